"""What Kubeflow Pipelines answers where it refuses something, in words for people."""

import json
from dataclasses import dataclass

import kfp_server_api

from trainer.errors import ConfigError, KubedetError, LaunchError

TOKEN = "KFP_EXISTING_TOKEN"  # noqa: S105 (a name)
"""Variable with a token, as kfp's command line has it. No option: other users of a machine
would see it among the processes."""

_TOKEN_FIX = (
    f"put a token into {TOKEN}, e.g. of `kubectl create token default-editor --namespace NAMESPACE "
    "--audience pipelines.kubeflow.org`"
)
_WORDS = 1000  # Characters of an answer.
_TEXT = 300  # Of one that is no JSON.


class Unavailable(LaunchError):
    """Kubeflow Pipelines cannot be reached or is not well: the same may work later."""


@dataclass(frozen=True)
class StopRequest:
    """A request, as far as an error tells of it."""

    verb: str
    """What it was for, e.g. "start the run nightly"."""
    where: str
    """Who was asked."""
    namespace: str = ""
    """Whose; empty is nobody's in particular."""
    creates: bool = False
    """Whether it makes something, which may have been made although no answer came."""

    @property
    def again(self) -> str:
        """What to do besides trying again."""
        return "; look at the UI first: it may have been taken all the same" if self.creates else ""


def refusal(error: kfp_server_api.ApiException, asked: StopRequest) -> KubedetError:
    """Make an error of an answer that is none.

    Args:
        error: what kfp's client has raised.
        asked: the request.

    Returns:
        Unavailable where the same may work later, else a ConfigError; with what to do.
    """
    said = _message(error)
    text = f"cannot {asked.verb}: {asked.where} answers {error.status} {error.reason or ''}".rstrip()
    text += f": {said}" if said else ""
    if error.status == 0:
        return ConfigError(text, fix="if the server's certificate is your own authority's, give --ca FILE")
    if error.status in (408, 429) or error.status >= 500:
        return Unavailable(text, fix=f"try again later{asked.again}; the log of ml-pipeline says more")
    if error.status == 401:
        return ConfigError(text, fix=_TOKEN_FIX)
    if error.status == 403:
        of = f"the namespace {asked.namespace}" if asked.namespace else "your namespace"
        return ConfigError(
            text, fix=f"name a --namespace that you may use, or ask for the role kubeflow-edit in {of}"
        )
    if error.status == 404:
        return ConfigError(text, fix="check the name, and --host: a Kubeflow's ends with /pipeline")
    return ConfigError(text, fix="correct what it names; a Kubeflow for several users needs --namespace")


def stranger(where: str) -> ConfigError:
    """Make an error of an answer that the API does not give: a page to log in at comes with status 200, too.

    Args:
        where: who has given it.
    """
    return ConfigError(
        f"{where} answers, but not as the API of Kubeflow Pipelines does",
        fix=f"if it is a page to log in at, {_TOKEN_FIX}; else correct --host: a Kubeflow's ends "
        "with /pipeline",
    )


def _message(error: kfp_server_api.ApiException) -> str:
    """Return the server's own words: a field of JSON, or the beginning of a text."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        answer = json.loads(body)
    except ValueError:
        return "" if "<html" in body.lower() else body.strip()[:_TEXT]
    words = answer.get("message") or answer.get("error") if isinstance(answer, dict) else None
    return str(words or "")[:_WORDS]
