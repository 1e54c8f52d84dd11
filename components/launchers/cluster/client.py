"""Connection to a cluster's API server: address, credentials, and requests with retries."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from components.launchers.cluster import api_errors
from components.launchers.timings import Timings
from trainer.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Load = Callable[[client.Configuration], None]

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LONG_WAIT = 5.0  # Seconds of waiting that are worth a line.
_TELL_EVERY = 60.0  # Seconds between two lines on an API server that has trouble.


class _Api(client.ApiClient):
    """An API client none of whose requests waits for ever: the SDK sets no time limits."""

    def __init__(self, configuration: client.Configuration, timings: Timings) -> None:
        super().__init__(configuration)
        self._limits = (timings.connect, timings.read)

    def call_api(self, *args: Any, _request_timeout: Any = None, **options: Any) -> Any:
        return super().call_api(*args, _request_timeout=_request_timeout or self._limits, **options)


class Trouble:
    """Logs that an API server has trouble: once, then once a minute, however many threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported_at = self._since = float("-inf")

    def tell(self, why: str) -> None:
        """Log that a request failed and is tried again, unless that was logged lately."""
        now = time.monotonic()
        with self._lock:
            if now - self._reported_at < _TELL_EVERY:
                return
            if now - self._reported_at > 2 * _TELL_EVERY:
                self._since = now
            self._reported_at = now
            span = f", for {(now - self._since) / 60:.0f} min" if now > self._since else ""
        logger.warning("the API server has trouble%s: %s; still trying", span, why)


class Cluster:
    """A namespace of a cluster; several threads may use one.

    Args:
        load: puts address and credentials into a configuration; called again at status 401.
        namespace: the namespace.
        timings: how long things may take.
    """

    def __init__(self, load: Load, namespace: str, timings: Timings) -> None:
        self._load = load
        self._configuration = client.Configuration()
        self._configuration.retries = False  # Or urllib3 tries three times behind our back.
        load(self._configuration)
        self.namespace = namespace
        self.timings = timings
        self.trouble = Trouble()
        self.api = _Api(self._configuration, timings)
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)

    def within(self, namespace: str) -> "Cluster":
        """Return another namespace of the same cluster."""
        return Cluster(self._load, namespace, self.timings)

    def refresh(self) -> None:
        """Load the credentials again: tokens are rotated."""
        self._load(self._configuration)

    def call(
        self,
        verb: str,
        resource: str,
        request: Callable[[], T],
        *,
        name: str = "",
        patience: float | None = None,
    ) -> T:
        """Make a request, and retry it with back-off while its failure is temporary.

        Those are 410, 429 (not before Retry-After), 5xx, lost connections and time-outs. At 401 the
        credentials are loaded again, once. A webhook that does not answer is waited for as long as an API
        server is while a job is watched: its controller is being started or moved.

        Args:
            verb: the verb for RBAC: get, list, create, patch, delete.
            resource: of what, e.g. pods/log.
            request: sends it; may be called several times.
            name: the object's name.
            patience: seconds until it is given up; 0 tries once; None is Timings.patience.

        Raises:
            ApiError: it was refused, or still failed after `patience`.
        """
        began = time.monotonic()
        patience = self.timings.patience if patience is None else patience
        waits = self.timings.waits()
        refreshed = False
        while True:
            try:
                return request()
            except (client.ApiException, HTTPError, OSError) as error:
                cause = error
            if getattr(cause, "status", 0) == 401 and not refreshed:
                refreshed = True
                self.refresh()
                continue
            wait = max(next(waits), api_errors.retry_after(cause))
            away = patience > 0 and api_errors.is_webhook_away(api_errors.reason(cause))
            end = began + (max(patience, self.timings.outage) if away else patience)
            if not api_errors.passes(cause) or time.monotonic() + wait > end:
                raise api_errors.api_error(cause, verb, resource, name, self.namespace) from None
            if wait > _LONG_WAIT:
                self.trouble.tell(api_errors.api_error(cause, verb, resource, name, self.namespace).message)
            time.sleep(wait)


def connect(
    namespace: str = "", *, kubeconfig: str = "", context: str = "", timings: Timings | None = None
) -> Cluster:
    """Return the cluster of a kubeconfig, or else that of this process's pod; sends no request.

    Args:
        namespace: the namespace; empty is the kubeconfig's or the pod's own.
        kubeconfig: path of a kubeconfig; empty is $KUBECONFIG or ~/.kube/config, if they are there.
        context: the kubeconfig's context; empty is its current one.
        timings: how long things may take.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG", "")
    if not path and (context or Path("~/.kube/config").expanduser().exists()):
        path = str(Path("~/.kube/config").expanduser())
    if not path and "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError(
            "no Kubernetes cluster: KUBECONFIG is not set, ~/.kube/config is missing, and this is no pod",
            fix="set KUBECONFIG to the path of a kubeconfig",
        )
    try:
        load, own = _from_file(path, context) if path else _from_pod()
        return Cluster(load, namespace or own or "default", timings or Timings())
    except (config.ConfigException, YAMLError, OSError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot use {path or 'the service account of this pod'} to reach a cluster: {error}",
            fix="see what `kubectl get pods` says",
        ) from None


def _from_file(path: str, context: str) -> tuple[Load, str]:
    """Return what loads a kubeconfig, and the namespace it names."""
    contexts, active = config.list_kube_config_contexts(path)
    if context:
        active = next((item for item in contexts if item["name"] == context), None)
        if active is None:
            raise LookupError(f"no context {context!r}; there are {[item['name'] for item in contexts]}")

    def load(configuration: client.Configuration) -> None:
        config.load_kube_config(path, context=active["name"], client_configuration=configuration)

    return load, active["context"].get("namespace", "")


def _from_pod() -> tuple[Load, str]:
    """Return what loads the credentials of this pod, and its namespace."""

    def load(configuration: client.Configuration) -> None:
        config.load_incluster_config(client_configuration=configuration)

    return load, own_namespace()


def own_namespace() -> str:
    """Return the namespace of the pod that this process runs in; nothing if it runs in none."""
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except FileNotFoundError:
        return ""
