"""The connection to a cluster: requests, retries, and errors with fixes."""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from components.launchers.backend import Timings
from components.launchers.cluster.kinds import KINDS, Resource
from components.launchers.cluster.roles import permission_fix
from trainer.base.clock import CLOCK, Clock
from trainer.base.errors import EXIT_USAGE, ConfigError, LaunchError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Load = Callable[..., None]  # Sets address and credentials in its `client_configuration`.

_RETRY_STATUSES = (410, 429, 500, 502, 503, 504)  # HTTP statuses to retry.
_INSTALL = {
    kind.plural: f"install {kind.controller}: the cluster does not know {kind.title}s"
    for kind in KINDS.values()
}
_SERVICE = re.compile(r"https://([a-z0-9-]+)\.([a-z0-9-]+)\.svc\b|service \"([a-z0-9-]+)\"")
_CLUSTER_SCOPED = ("nodes", "namespaces", "version")
_FIXES = {
    0: "check that the API server can be reached from here, and that its certificate is trusted",
    401: "log in to the cluster again: the credentials have expired or are invalid",
    403: "change the job as the message says; RBAC is not the cause",
    422: "change the job as the message says: the cluster's definition of such a job forbids it",
    **dict.fromkeys(_RETRY_STATUSES, "the API server has trouble: look at its log, or try again later"),
}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MIN_REPORTED_WAIT = 5.0  # Waits longer than this (seconds) are logged.
_REPORT_EVERY = 60.0  # Seconds between two log lines about failing requests.


class ApiError(LaunchError):
    """The API server rejected a request, or did not respond."""

    def __init__(self, message: str, *, status: int = 0, absent: bool = False, fix: str = "") -> None:
        super().__init__(message, fix=fix, transient=status == 0 or status in _RETRY_STATUSES)
        self.status = status  # HTTP status; 0: no response.
        self.absent = absent  # Whether the object does not exist, while its resource and namespace do.
        self.unknown = status == 404 and not absent
        """Whether the resource is not installed, or the namespace does not exist."""
        by_others = "admission webhook" in message or "exceeded quota" in message
        self.forbidden = status == 403 and not by_others  # Whether RBAC refuses it.
        self.webhook_away = "failed calling webhook" in message or "no endpoints available" in message
        """Whether it failed because an admission webhook (usually of a controller) does not respond."""
        if not self.transient:
            self.exit_code = EXIT_USAGE


def api_error(error: BaseException, verb: str, resource: str, name: str, namespace: str) -> ApiError:
    """Return the error for a failed request, with a fix; verb and resource (e.g. pods/log) are RBAC's."""
    status = (error.status or 0) if isinstance(error, ApiException) else 0
    try:
        body = json.loads(getattr(error, "body", "") or "")
    except ValueError:
        body = None
    answer: Mapping[str, Any] = body if isinstance(body, dict) else {}
    if isinstance(error, ApiException) and status:
        title = f"{status} {error.reason or ''}".strip()
        message = str(answer.get("message") or error.body or "").strip()
        reason = f"{title}: {message[:2000]}" if message else title
    else:
        text = " ".join(str(getattr(error, "reason", "") or error).split())
        reason = f"no answer ({text or type(error).__name__})"
    about = answer.get("details") or {}
    where = "" if resource in _CLUSTER_SCOPED else f" in namespace {namespace}"
    in_absent = about.get("kind") == "namespaces"  # A namespace that does not exist.
    absent = status == 404 and bool(about) and (not in_absent or resource == "namespaces")
    text = f"cannot {' '.join(filter(None, [verb, resource, name]))}{where}: {reason}"
    result = ApiError(text, status=status, absent=absent, fix=_FIXES.get(status, ""))
    if result.webhook_away:
        result.fix = "start the controller of this webhook, which does not answer"
        if service := _SERVICE.search(result.message):
            place = f"-n {service[2]}" if service[2] else "--all-namespaces"
            result.fix = (
                f"the webhook's Service {service[1] or service[3]} does not answer: start its controller "
                f"(`kubectl get pods {place}` shows its state)"
            )
    elif result.forbidden:
        of_cluster = resource in _CLUSTER_SCOPED or "at the cluster scope" in reason
        named = re.search('in the namespace "([^"]+)"', reason)  # May differ from the jobs' namespace.
        result.fix = permission_fix(resource, [verb], "" if of_cluster else named[1] if named else namespace)
    elif status == 404 and not answer:
        result.fix = _INSTALL.get(resource, "")
    elif status == 404 and in_absent:
        result.fix = f"create the namespace {namespace}, or name another"
    return result


class _Api(client.ApiClient):
    """An API client that sets a time limit for every request; the SDK sets none."""

    def __init__(self, configuration: client.Configuration, timings: Timings) -> None:
        super().__init__(configuration)
        self._limits = (timings.connect, timings.read)

    def call_api(self, *args: Any, _request_timeout: Any = None, **options: Any) -> Any:
        return super().call_api(*args, _request_timeout=_request_timeout or self._limits, **options)


class Cluster:
    """A namespace of a cluster; thread-safe. `load` reads the credentials.

    `pool` replaces urllib3's PoolManager.
    """

    def __init__(
        self, load: Load, namespace: str, timings: Timings, *, clock: Clock = CLOCK, pool: Any = None
    ) -> None:
        self._load = load
        self._configuration = client.Configuration()
        self._configuration.retries = False  # Otherwise urllib3 tries three times.
        self.refresh()
        self.namespace = namespace
        self.timings, self.clock = timings, clock
        self._reported_at, self._in_trouble = float("-inf"), False
        self.api = _Api(self._configuration, timings)
        self._pool = pool
        if pool is not None:
            self.api.rest_client.pool_manager = pool
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)

    def in_namespace(self, namespace: str) -> "Cluster":
        """Return a client for another namespace of the same cluster."""
        return Cluster(self._load, namespace, self.timings, clock=self.clock, pool=self._pool)

    def refresh(self) -> None:
        """Reload the credentials, because tokens are rotated."""
        self._load(client_configuration=self._configuration)

    def report_trouble(self, reason: str) -> None:
        """Log that a request failed and is retried, at most once a minute."""
        now = self.clock.monotonic()
        if now - self._reported_at >= _REPORT_EVERY:
            self._reported_at, self._in_trouble = now, True
            logger.warning("the API server has trouble: %s; still trying", reason)

    def call(
        self,
        verb: str,
        resource: str,
        request: Callable[..., T],
        *arguments: Any,
        name: str = "",
        patience: float | None = None,
        **options: Any,
    ) -> T:
        """Call `request` with its arguments and options; retry temporary failures with back-off.

        Temporary failures are 410, 429 (after Retry-After), 5xx, lost connections and timeouts. After a 401,
        the credentials are reloaded once. If a webhook does not respond, retry up to Timings.outage, because
        its controller may be starting. `verb` and `resource` (e.g. pods/log) are RBAC's, for messages;
        `patience` limits the retries in seconds (0: none; None: Timings.patience).
        """
        began = self.clock.monotonic()
        patience = self.timings.patience if patience is None else patience
        waits = self.timings.retry_delays()
        refreshed = False
        while True:
            try:
                result = request(*arguments, **options)
            except (ApiException, HTTPError, OSError) as error:
                cause = error
            else:
                if self._in_trouble:
                    self._in_trouble = False
                    logger.info("the API server answers again")
                return result
            if getattr(cause, "status", 0) == 401 and not refreshed:
                refreshed = True
                self.refresh()
                continue
            refusal = api_error(cause, verb, resource, name, self.namespace)
            try:
                retry_after = float((getattr(cause, "headers", None) or {}).get("Retry-After", 0))
            except ValueError:  # A date, which Kubernetes never sends.
                retry_after = 0.0
            wait = max(next(waits), retry_after)
            longest = max(patience, self.timings.outage) if patience and refusal.webhook_away else patience
            if not refusal.transient or self.clock.monotonic() + wait > began + longest:
                raise refusal from None
            if wait > _MIN_REPORTED_WAIT:
                self.report_trouble(refusal.message)
            self.clock.sleep(wait)

    def request(
        self, verb: str, resource: Resource, name: str = "", *, patience: float | None = None, **options: Any
    ) -> Any:
        """Get, list, create, patch or delete objects of a resource, with the options of CustomObjectsApi."""
        method = getattr(self.custom, f"{verb}_namespaced_custom_object")
        place = [resource.group, resource.version, self.namespace, resource.plural]
        place += [name] if verb in ("get", "patch", "delete") else []
        return self.call(verb, resource.plural, method, *place, name=name, patience=patience, **options)

    def find(self, resource: Resource, name: str, *, patience: float | None = None, **options: Any) -> Any:
        """Return an object as parsed JSON; None if it does not exist."""
        try:
            return self.request("get", resource, name, patience=patience, **options)
        except ApiError as error:
            if error.absent:
                return None
            raise


def connect(namespace: str = "", *, timings: Timings | None = None) -> Cluster:
    """Connect to the cluster of the kubeconfig or of this pod; its namespace is the default."""
    usual = Path("~/.kube/config").expanduser()
    path = os.environ.get("KUBECONFIG", "") or (str(usual) if usual.exists() else "")
    if not path and "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError(
            "no Kubernetes cluster: KUBECONFIG is not set, ~/.kube/config is missing, and this is not a pod",
            fix="set KUBECONFIG to the path of a kubeconfig",
        )
    try:
        load: Load = config.load_incluster_config
        own = own_namespace()
        if path:
            _, active = config.list_kube_config_contexts(path)
            load = partial(config.load_kube_config, path, context=active["name"])
            own = active["context"].get("namespace", "")
        return Cluster(load, namespace or own or "default", timings or Timings())
    except (config.ConfigException, YAMLError, OSError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot use {path or 'the service account of this pod'} to reach a cluster: {error}",
            fix="check it with `kubectl get pods`",
        ) from None


def own_namespace() -> str:
    """Return the namespace of the pod that this process runs in; "" outside of a pod."""
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except FileNotFoundError:
        return ""
