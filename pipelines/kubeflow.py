"""Talks to Kubeflow Pipelines: connects as its own client does, and says what was refused and why.

kfp's client decides where and who: a host, or the service of the cluster that this runs in, or
the API server of a kubeconfig; a token from the environment or the one that a pod is given. Its
further calls have neither time limits nor messages for people, so those of its API are used.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kfp
import kfp_server_api
import kubernetes
import urllib3
import yaml
from kfp.client import KF_PIPELINES_SA_TOKEN_ENV, KF_PIPELINES_SA_TOKEN_PATH
from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

from trainer.errors import ConfigError, KubedetError, LaunchError

HOSTS = ("KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
"""Variables with the API's URL, the first of kfp's command line and the second of its client."""

UI = "KF_PIPELINES_UI_ENDPOINT"
"""Variable with the URL of the UI where it is another, as kfp's client has it."""

NAMESPACE = "KFP_NAMESPACE"
"""Variable with the namespace, as kfp's command line has it."""

TOKEN = "KFP_EXISTING_TOKEN"  # noqa: S105 (a name)
"""Variable with a token, as kfp's command line has it. No option: other users of a machine
would see it among the processes."""

_SECONDS = (10, 60)
"""To connect, and to wait for an answer."""
_PAGE = 100
_TOKEN_FIX = (
    f"put a token into {TOKEN}, e.g. of `kubectl create token default-editor --namespace NAMESPACE "
    "--audience pipelines.kubeflow.org`"
)


class Unavailable(LaunchError):
    """Kubeflow Pipelines cannot be reached or is not well: the same may work later."""


@dataclass(frozen=True)
class Access:
    """Where Kubeflow Pipelines is."""

    host: str = ""
    """URL of the API; empty is the cluster around this process, or that of the kubeconfig."""
    namespace: str = ""
    """Namespace of the runs, in a Kubeflow for several users; empty is the pod's own there."""
    ca: str = ""
    """File with the certificate of the authority that signed the server's."""

    @classmethod
    def find(cls, host: str = "", namespace: str = "", ca: str = "") -> "Access":
        """Return what is named, and of the environment what is not."""
        hosts = [host, *(os.environ.get(name, "") for name in HOSTS)]
        url = next((url for url in hosts if url), "").rstrip("/")
        return cls(url, namespace or os.environ.get(NAMESPACE, ""), ca)


class _Client(kfp.Client):
    """kfp's client, without its half minute of tracebacks and its file in the user's home."""

    def _load_config(self, *arguments: Any) -> kfp_server_api.Configuration:
        config = super()._load_config(*arguments)
        config.host = host = config.host.rstrip("/")
        refresh = config.refresh_api_key_hook

        def refresh_token(changed: kfp_server_api.Configuration) -> None:
            refresh(changed)
            # A kubeconfig's takes away this hook, and the way to the service behind the API server.
            changed.host, changed.refresh_api_key_hook = host, refresh_token

        if refresh is not None:
            config.refresh_api_key_hook = refresh_token
        return config

    def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
        return self.healthzs.healthz_service_get_healthz(_request_timeout=_SECONDS)

    def set_user_namespace(self, namespace: str) -> None:
        self._context_setting["namespace"] = namespace


class Server:
    """One Kubeflow Pipelines. All methods raise KubedetErrors that say what was refused."""

    def __init__(self, access: Access) -> None:
        """Connect.

        Raises:
            ConfigError: there is nothing to connect to, or the token is not accepted.
            Unavailable: it does not answer.
        """
        _check_there_is_one(access)
        self._access = access
        own = os.environ.get(KF_PIPELINES_SA_TOKEN_ENV) or KF_PIPELINES_SA_TOKEN_PATH
        projected = ServiceAccountTokenVolumeCredentials() if Path(own).exists() else None
        with warnings.catch_warnings(), self._explained("connect"):
            warnings.simplefilter("ignore")  # Of versions before 2.0, which there are no more.
            self._client = _Client(
                host=access.host or None,
                existing_token=os.environ.get(TOKEN, "").strip() or None,
                credentials=projected,
                ssl_ca_cert=access.ca or None,
            )
        self.namespace = access.namespace or self._client.get_user_namespace() or ""

    def experiment(self, name: str) -> str:
        """Return the id of the experiment of that name; a new one's where there is none."""
        wanted = {"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]}
        api = self._client.experiments
        with self._explained(f"look for the experiment {name}"):
            found = api.experiment_service_list_experiments(
                filter=json.dumps(wanted), namespace=self.namespace, _request_timeout=_SECONDS
            )
        for experiment in found.experiments or []:
            if experiment.display_name == name:
                return self._known(experiment.experiment_id)
        body = kfp_server_api.V2beta1Experiment(display_name=name, namespace=self.namespace or None)
        with self._explained(f"create the experiment {name}", creates=True):
            made = api.experiment_service_create_experiment(experiment=body, _request_timeout=_SECONDS)
        return self._known(made.experiment_id)

    def create_run(
        self, name: str, experiment: str, package: dict[str, Any], parameters: dict[str, Any]
    ) -> str:
        """Start a run.

        Args:
            name: how people see it.
            experiment: id of its experiment.
            package: the compiled pipeline, as the API takes it.
            parameters: of the pipeline.

        Returns:
            The run's id.
        """
        body = kfp_server_api.V2beta1Run(
            display_name=name,
            experiment_id=experiment,
            pipeline_spec=package,
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=parameters),
        )
        with self._explained(f"start the run {name}", creates=True):
            made = self._client.runs.run_service_create_run(run=body, _request_timeout=_SECONDS)
        return self._known(made.run_id)

    def run(self, run_id: str) -> kfp_server_api.V2beta1Run:
        """Return how a run is."""
        with self._explained(f"look at the run {run_id}"):
            return self._client.runs.run_service_get_run(run_id=run_id, _request_timeout=_SECONDS)

    def schedules(self) -> list[kfp_server_api.V2beta1RecurringRun]:
        """Return the recurring runs of the namespace."""
        found: list[kfp_server_api.V2beta1RecurringRun] = []
        token = ""
        while True:
            with self._explained("list the schedules"):
                page = self._client.recurring_runs.recurring_run_service_list_recurring_runs(
                    namespace=self.namespace,
                    page_size=_PAGE,
                    page_token=token,
                    _request_timeout=_SECONDS,
                )
            found += page.recurring_runs or []
            token = page.next_page_token
            if not token:
                return found

    def create_schedule(self, body: kfp_server_api.V2beta1RecurringRun) -> str:
        """Create a recurring run; returns its id."""
        with self._explained(f"create the schedule {body.display_name}", creates=True):
            made = self._client.recurring_runs.recurring_run_service_create_recurring_run(
                recurring_run=body, _request_timeout=_SECONDS
            )
        return self._known(made.recurring_run_id)

    def enable_schedule(self, schedule_id: str) -> None:
        """Let a recurring run that was disabled come due again."""
        with self._explained(f"enable the schedule {schedule_id}"):
            self._client.recurring_runs.recurring_run_service_enable_recurring_run(
                recurring_run_id=schedule_id, _request_timeout=_SECONDS
            )

    def delete_schedule(self, schedule_id: str) -> None:
        """Delete a recurring run; the runs it has started stay."""
        with self._explained(f"delete the schedule {schedule_id}"):
            self._client.recurring_runs.recurring_run_service_delete_recurring_run(
                recurring_run_id=schedule_id, _request_timeout=_SECONDS
            )

    def link(self, kind: str, what: str) -> str:
        """Return the address of a run (`runs`) or schedule (`recurringrun`) in the UI."""
        base = os.environ.get(UI) or self._access.host
        if base and not base.startswith(("http://", "https://")):
            base = f"https://{base}"
        # In a cluster nobody knows under which name people reach its UI.
        return f"{base.rstrip('/') or '<Kubeflow Pipelines>'}/#/{kind}/details/{what}"

    def _known(self, found: str | None) -> str:
        """Refuse an answer without an id: a page to log in at comes with status 200, too."""
        if not found:
            raise ConfigError(
                f"{self._where} answers, but not as the API of Kubeflow Pipelines does",
                fix=f"if it is a page to log in at, {_TOKEN_FIX}; else correct --host: a Kubeflow's ends "
                "with /pipeline",
            )
        return found

    @property
    def _where(self) -> str:
        return f"Kubeflow Pipelines at {self._access.host or 'the cluster of this pod or kubeconfig'}"

    @contextmanager
    def _explained(self, verb: str, *, creates: bool = False) -> Iterator[None]:
        """Turn what the client raises into an error that says what failed and what to do."""
        try:
            yield
        except kfp_server_api.ApiException as error:
            raise self._refusal(error, verb, creates=creates) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            again = "; look at the UI first: it may have been taken all the same" if creates else ""
            raise Unavailable(
                f"cannot {verb}: {self._where} cannot be reached: {str(reason).rpartition(': ')[2]}",
                fix=f"check --host ({HOSTS[0]}) and the network, then try again{again}",
            ) from None

    def _refusal(self, error: kfp_server_api.ApiException, verb: str, *, creates: bool) -> KubedetError:
        said = _message(error)
        text = f"cannot {verb}: {self._where} answers {error.status} {error.reason or ''}".rstrip()
        text += f": {said}" if said else ""
        if error.status == 0:
            return ConfigError(
                text, fix="if the server's certificate is your own authority's, give --ca FILE"
            )
        if error.status in (408, 429) or error.status >= 500:
            again = "; look at the UI first: it may have been taken all the same" if creates else ""
            return Unavailable(text, fix=f"try again later{again}; the log of ml-pipeline says more")
        if error.status == 401:
            return ConfigError(text, fix=_TOKEN_FIX)
        if error.status == 403:
            of = f"the namespace {self.namespace}" if getattr(self, "namespace", "") else "your namespace"
            return ConfigError(
                text, fix=f"name a --namespace that you may use, or ask for the role kubeflow-edit in {of}"
            )
        if error.status == 404:
            return ConfigError(text, fix="check the name, and --host: a Kubeflow's ends with /pipeline")
        return ConfigError(text, fix="correct what it names; a Kubeflow for several users needs --namespace")


def _check_there_is_one(access: Access) -> None:
    """Refuse where kfp's client would go on with an address of its own invention."""
    if access.ca and not Path(access.ca).is_file():
        raise ConfigError(f"--ca {access.ca} is no file", fix="name a file with a certificate (PEM)")
    if access.host or os.environ.get("KUBERNETES_SERVICE_HOST"):
        return
    try:
        kubernetes.config.load_kube_config(client_configuration=kubernetes.client.Configuration())
    except (kubernetes.config.ConfigException, yaml.YAMLError, OSError) as error:
        raise ConfigError(
            f"no Kubeflow Pipelines to talk to: no host is named, and of the kubeconfig: {error}",
            fix=f"name its URL with --host or {HOSTS[0]}; a Kubeflow's ends with /pipeline",
        ) from None


def _message(error: kfp_server_api.ApiException) -> str:
    """Return the server's own words: a field of JSON, or the beginning of a text."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        answer = json.loads(body)
    except ValueError:
        return "" if "<html" in body.lower() else body.strip()[:300]
    words = answer.get("message") or answer.get("error") if isinstance(answer, dict) else None
    return str(words or "")[:1000]
