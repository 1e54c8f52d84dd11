"""The way to a cluster's API server: its address, and requests that survive a bad minute."""

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

from components.launchers.cluster import refusals
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
    """Tells of an API server that has trouble: once, then once a minute, however many threads ask it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = self._since = float("-inf")

    def tell(self, why: str) -> None:
        """Say that a request failed and is tried again, unless that was said lately."""
        now = time.monotonic()
        with self._lock:
            if now - self._told < _TELL_EVERY:
                return
            if now - self._told > 2 * _TELL_EVERY:
                self._since = now
            self._told = now
            span = f", for {(now - self._since) / 60:.0f} min" if now > self._since else ""
        logger.warning("the API server has trouble%s: %s; still trying", span, why)


class Cluster:
    """A namespace of a cluster; several threads may use one.

    Args:
        load: puts address and credentials into a configuration; asked again when they are refused.
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
        """Read the credentials anew: tokens are rotated."""
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
        """Make a request, again and again while it fails for reasons that pass.

        Those are 410, 429 (not before Retry-After), 5xx, lost connections and time-outs.
        Credentials that are refused are read anew, once.

        Args:
            verb: what RBAC calls it: get, list, create, patch, delete.
            resource: of what, e.g. pods/log.
            request: makes it; it may be called several times.
            name: the object's name.
            patience: seconds until it is given up; 0 tries once; None is that of the timings.

        Raises:
            ApiError: it was refused, or the patience came to an end.
        """
        end = time.monotonic() + (self.timings.patience if patience is None else patience)
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
            wait = max(next(waits), refusals.retry_after(cause))
            if not refusals.passes(cause) or time.monotonic() + wait > end:
                raise refusals.told(cause, verb, resource, name, self.namespace) from None
            if wait > _LONG_WAIT:
                self.trouble.tell(refusals.told(cause, verb, resource, name, self.namespace).message)
            time.sleep(wait)


def connect(
    namespace: str = "", *, kubeconfig: str = "", context: str = "", timings: Timings | None = None
) -> Cluster:
    """Find the cluster that this process means: a kubeconfig's, or else that of its own pod.

    Nothing is sent.

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
