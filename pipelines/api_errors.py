"""Turns error responses of Kubeflow Pipelines into errors that say what failed and what to do."""

import json
from dataclasses import dataclass

import kfp_server_api

from trainer.base.errors import ConfigError, KubedetError, LaunchError

TOKEN = "KFP_EXISTING_TOKEN"  # noqa: S105 (a name)
"""Variable with a token, as kfp's command line names it. There is no option for it: other users of
a machine would see it in the list of processes."""

_TOKEN_FIX = (
    f"put a token into {TOKEN}, e.g. of `kubectl create token default-editor --namespace NAMESPACE "
    "--audience pipelines.kubeflow.org`"
)
_MESSAGE_LIMIT = 1000  # Characters of a message in JSON.
_TEXT_LIMIT = 300  # Characters of a response that is no JSON.


class Unavailable(LaunchError):
    """Kubeflow Pipelines cannot be reached or has an internal error: the same request may work later."""


@dataclass(frozen=True)
class Request:
    """A request to Kubeflow Pipelines, as an error message describes it."""

    verb: str
    """What it was to do, e.g. "start the run nightly"."""
    where: str
    """The server it was sent to."""
    namespace: str = ""
    """The namespace it was for; empty is none in particular."""
    creates: bool = False
    """Whether it creates something, which may exist although no response came."""

    @property
    def hint(self) -> str:
        """What to do before trying again; empty where nothing is needed."""
        return "; look at the UI first: it may have been taken all the same" if self.creates else ""


def from_response(error: kfp_server_api.ApiException, request: Request) -> KubedetError:
    """Return the error that an error response of the API stands for.

    Args:
        error: as kfp's client raised it.
        request: the request that failed.

    Returns:
        Unavailable where the same may work later, else a ConfigError; with what to do.
    """
    message = _message(error)
    text = f"cannot {request.verb}: {request.where} answers {error.status} {error.reason or ''}".rstrip()
    text += f": {message}" if message else ""
    if error.status == 0:
        return ConfigError(text, fix="if the server's certificate is your own authority's, give --ca FILE")
    if error.status in (408, 429) or error.status >= 500:
        return Unavailable(text, fix=f"try again later{request.hint}; the log of ml-pipeline says more")
    if error.status == 401:
        return ConfigError(text, fix=_TOKEN_FIX)
    if error.status == 403:
        of = f"the namespace {request.namespace}" if request.namespace else "your namespace"
        return ConfigError(
            text, fix=f"name a --namespace that you may use, or ask for the role kubeflow-edit in {of}"
        )
    if error.status == 404:
        return ConfigError(text, fix="check the name, and --host: a Kubeflow's ends with /pipeline")
    return ConfigError(text, fix="correct what it names; a Kubeflow for several users needs --namespace")


def not_the_api(where: str) -> ConfigError:
    """Return the error for a response that is not the API's: a login page also comes with status 200.

    Args:
        where: the server that sent it.
    """
    return ConfigError(
        f"{where} answers, but not as the API of Kubeflow Pipelines does",
        fix=f"if it is a page to log in at, {_TOKEN_FIX}; else correct --host: a Kubeflow's ends "
        "with /pipeline",
    )


def _message(error: kfp_server_api.ApiException) -> str:
    """Return the message in a response: a field of its JSON, or the beginning of its text."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        response = json.loads(body)
    except ValueError:
        return "" if "<html" in body.lower() else body.strip()[:_TEXT_LIMIT]
    message = response.get("message") or response.get("error") if isinstance(response, dict) else None
    return str(message or "")[:_MESSAGE_LIMIT]
