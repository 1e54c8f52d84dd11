"""Errors of the API server: what each refusal means, and how to fix it."""

import json
import re
from typing import Any

from kubernetes.client import ApiException

from trainer.errors import EXIT_USAGE, LaunchError

PASSING = (410, 429, 500, 502, 503, 504)
"""HTTP statuses that are worth another try."""

_TRAINER, _KUEUE = "trainer.kubeflow.org", "kueue.x-k8s.io"
_GROUPS = {
    "pytorchjobs": "kubeflow.org", "trainjobs": _TRAINER, "trainingruntimes": _TRAINER,
    "workflows": "argoproj.io", "workloads": _KUEUE, "localqueues": _KUEUE,
}  # fmt: skip
_INSTALL = {
    "pytorchjobs": "install the Training Operator (v1.9): the cluster does not know PyTorchJobs",
    "trainjobs": "install Kubeflow Trainer (v2.3): the cluster does not know TrainJobs",
}
_NO_WEBHOOK = ("failed calling webhook", "no endpoints available")
_SERVICE = re.compile(r"https://([a-z0-9-]+)\.([a-z0-9-]+)\.svc\b|service \"([a-z0-9-]+)\"")
_WITHOUT_NAMESPACE = ("nodes", "namespaces", "version", "customresourcedefinitions")
"""Resources that are cluster-scoped."""
_FIXES = {
    0: "see that the API server can be reached from here, and that its certificate is trusted",
    401: "log in to the cluster again: the credentials have expired or are not known",
    403: "change the job as the message says; it is not a matter of RBAC",
    422: "change the job as the message says: the cluster's definition of such a job forbids it",
}


class ApiError(LaunchError):
    """The API server refused a request, or did not answer."""

    def __init__(self, message: str, *, status: int = 0, absent: bool = False, fix: str = "") -> None:
        super().__init__(message, fix=fix, passing=status == 0 or status in PASSING)
        self.status = status
        """The HTTP status; 0 is no answer."""
        self.absent = absent
        """Whether the object does not exist, while its resource and namespace do."""
        self.unknown = status == 404 and not absent
        """Whether the resource is not installed, or the namespace does not exist."""
        self.forbidden = status == 403 and not _by_others(message)
        """Whether RBAC refuses it; other 403s come from a webhook or a quota."""
        if not self.passing:
            self.exit_code = EXIT_USAGE


def passes(error: BaseException) -> bool:
    """Whether the same request may do better a little later."""
    return error.status in PASSING if isinstance(error, ApiException) else True


def is_webhook_away(message: str) -> bool:
    """Return whether a request failed only because an admission webhook, mostly a controller's, does not
    answer.
    """
    return any(words in message for words in _NO_WEBHOOK)


def retry_after(error: BaseException) -> float:
    """Return the seconds of the Retry-After header; 0 without one."""
    headers = getattr(error, "headers", None) or {}
    try:
        return float(headers.get("Retry-After", 0))
    except ValueError:  # A date, which Kubernetes never sends.
        return 0.0


def reason(error: BaseException) -> str:
    """Return the error as text: status, reason and the server's message."""
    if not isinstance(error, ApiException) or not error.status:
        words = " ".join(str(getattr(error, "reason", "") or error).split())
        return f"no answer ({words or type(error).__name__})"
    title = f"{error.status} {error.reason or ''}".strip()
    message = str(_answer(error).get("message") or error.body or "").strip()
    return f"{title}: {message[:2000]}" if message else title


def api_error(error: BaseException, verb: str, resource: str, name: str, namespace: str) -> ApiError:
    """Make the user's error of a failed request, with its fix.

    Args:
        error: the exception of the request.
        verb: what RBAC calls the request.
        resource: what it asked for, e.g. pods/log.
        name: the object's name, or nothing.
        namespace: where it was.
    """
    status = (error.status or 0) if isinstance(error, ApiException) else 0
    what = " ".join(filter(None, [verb, resource, name]))
    about = (_answer(error).get("details") or {}) if isinstance(error, ApiException) else {}
    where = "" if resource in _WITHOUT_NAMESPACE else f" in namespace {namespace}"
    return ApiError(
        f"cannot {what}{where}: {reason(error)}",
        status=status,
        absent=status == 404 and bool(about) and about.get("kind") != "namespaces",
        fix=_fix(error, status, verb, resource, namespace),
    )


def _fix(error: BaseException, status: int, verb: str, resource: str, namespace: str) -> str:
    answer = _answer(error) if isinstance(error, ApiException) else {}
    message, about = str(answer.get("message", "")), (answer.get("details") or {}).get("kind")
    if status in PASSING:
        trouble = "the API server has trouble: look at its log, or try again later"
        return _start_webhook(message) if is_webhook_away(message) else trouble
    if status == 403 and not _by_others(message):
        if resource in _WITHOUT_NAMESPACE:
            return f'allow it with a ClusterRole: resources ["{resource}"], verbs ["{verb}"]'
        return (
            f'allow it with a Role in namespace {namespace}: apiGroups ["{_GROUPS.get(resource, "")}"], '
            f'resources ["{resource}"], verbs ["{verb}"]; the Role in deploy/, which `kubedet manifests` '
            "writes, holds all that is needed"
        )
    if status == 404 and resource in _INSTALL and not answer:
        return _INSTALL[resource]
    if status == 404 and about == "namespaces":
        return f"create the namespace {namespace}, or name another"
    return _FIXES.get(status, "")


def _start_webhook(message: str) -> str:
    service = _SERVICE.search(message)
    if service is None:
        return "start the controller of this webhook, which does not answer"
    name, namespace = service[1] or service[3], service[2] or "--all-namespaces"
    return (
        f"the webhook's Service {name} does not answer: start its controller "
        f"(`kubectl get pods -n {namespace}` shows its state)"
    ).replace("-n --all", "--all")


def _by_others(message: str) -> bool:
    """Whether a webhook or a quota refused the request."""
    return "admission webhook" in message or "exceeded quota" in message


def _answer(error: ApiException) -> dict[str, Any]:
    """Return the response's Status object; empty if the body is not one."""
    try:
        body = json.loads(error.body or "")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
