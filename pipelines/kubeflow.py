"""Client of the API of Kubeflow Pipelines: connects as kfp does; errors say what failed and what to do.

kfp's client decides on the server and the user: a host, or the service of the cluster that this runs in, or
the API server of a kubeconfig; a token from the environment or the one that a pod is given. Its
other calls have neither timeouts nor readable errors, so those of kfp_server_api are used.
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

from pipelines.access import HOSTS, UI, Access
from pipelines.release import Release
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

_SECONDS = (10, 60)
"""To connect, and to wait for an answer."""
_PAGE = 100
_ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


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
        health = self.health()
        return kfp_server_api.V2beta1GetHealthzResponse(multi_user=bool(health.get("multi_user")))

    def health(self) -> dict[str, Any]:
        """Return the server's health response as a dict: the model of kfp's client leaves out the version."""
        health = self.healthzs.api_client.call_api(
            "/apis/v2beta1/healthz", "GET", header_params={"Accept": "application/json"},
            response_type="object", auth_settings=["Bearer"], _return_http_data_only=True,
            _request_timeout=_SECONDS,
        )  # fmt: skip
        if not isinstance(health, dict):
            raise not_the_api(f"Kubeflow Pipelines at {self.healthzs.api_client.configuration.host}")
        return health

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
        _check_configured(access)
        self._access = access
        token_file = os.environ.get(KF_PIPELINES_SA_TOKEN_ENV) or KF_PIPELINES_SA_TOKEN_PATH
        projected = ServiceAccountTokenVolumeCredentials() if Path(token_file).exists() else None
        with warnings.catch_warnings(), self._explained("connect"):
            warnings.simplefilter("ignore")  # Of versions before 2.0, which there are no more.
            self._client = _Client(
                host=access.host or None,
                existing_token=os.environ.get(TOKEN, "").strip() or None,
                credentials=projected,
                ssl_ca_cert=access.ca or None,
            )
        self.namespace = access.namespace or self._client.get_user_namespace() or ""

    def release(self) -> Release:
        """Return which version it is."""
        with self._explained("ask for the version"):
            return Release(str(self._client.health().get("tag_name") or ""))

    def experiment(self, name: str) -> str:
        """Return the id of the experiment of that name; a new one's where there is none."""
        experiment_id = self._find_experiment(name)
        if experiment_id:
            return experiment_id
        body = kfp_server_api.V2beta1Experiment(display_name=name, namespace=self.namespace or None)
        with self._explained(f"create the experiment {name}", creates=True):
            try:
                created = self._client.experiments.experiment_service_create_experiment(
                    experiment=body, _request_timeout=_SECONDS
                )
            except kfp_server_api.ApiException as error:
                # Of two that submit their first runs at the same time, one creates it.
                if error.status == 409 and (experiment_id := self._find_experiment(name)):
                    return experiment_id
                raise
        return self._id_of(created.experiment_id)

    def _find_experiment(self, name: str) -> str:
        """Return the id of the experiment of that name, or an empty string."""
        by_name = {"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]}
        with self._explained(f"look for the experiment {name}"):
            experiments = self._client.experiments.experiment_service_list_experiments(
                filter=json.dumps(by_name), namespace=self.namespace, _request_timeout=_SECONDS
            )
        for experiment in experiments.experiments or []:
            if experiment.display_name == name:
                return self._id_of(experiment.experiment_id)
        return ""

    def create_run(
        self, name: str, experiment: str, package: dict[str, Any], parameters: dict[str, Any],
        description: str = "",
    ) -> str:  # fmt: skip
        """Start a run.

        Args:
            name: how people see it.
            experiment: id of its experiment.
            package: the compiled pipeline, as the API takes it.
            parameters: of the pipeline.
            description: shown with it; may be empty.

        Returns:
            The run's id.
        """
        body = kfp_server_api.V2beta1Run(
            display_name=name,
            experiment_id=experiment,
            pipeline_spec=package,
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=parameters),
            description=description or None,
        )
        with self._explained(f"start the run {name}", creates=True):
            created = self._client.runs.run_service_create_run(run=body, _request_timeout=_SECONDS)
        return self._id_of(created.run_id)

    def run(self, run_id: str) -> kfp_server_api.V2beta1Run:
        """Return a run with its state."""
        with self._explained(f"look at the run {run_id}"):
            return self._client.runs.run_service_get_run(run_id=run_id, _request_timeout=_SECONDS)

    def schedules(self) -> list[kfp_server_api.V2beta1RecurringRun]:
        """Return the recurring runs of the namespace."""
        schedules: list[kfp_server_api.V2beta1RecurringRun] = []
        token = ""
        while True:
            with self._explained("list the schedules"):
                page = self._client.recurring_runs.recurring_run_service_list_recurring_runs(
                    namespace=self.namespace,
                    page_size=_PAGE,
                    page_token=token,
                    _request_timeout=_SECONDS,
                )
            schedules += page.recurring_runs or []
            token = page.next_page_token
            if not token:
                return schedules

    def create_schedule(self, body: kfp_server_api.V2beta1RecurringRun) -> str:
        """Create a recurring run; returns its id."""
        with self._explained(f"create the schedule {body.display_name}", creates=True):
            created = self._client.recurring_runs.recurring_run_service_create_recurring_run(
                recurring_run=body, _request_timeout=_SECONDS
            )
        return self._id_of(created.recurring_run_id)

    def enable_schedule(self, schedule_id: str) -> None:
        """Let a recurring run that was disabled come due again."""
        with self._explained(f"enable the schedule {schedule_id}"):
            self._client.recurring_runs.recurring_run_service_enable_recurring_run(
                recurring_run_id=schedule_id, _request_timeout=_SECONDS
            )

    def disable_schedule(self, schedule_id: str) -> None:
        """Let a recurring run come due no more; a run that it has started goes on."""
        with self._explained(f"disable the schedule {schedule_id}"):
            self._client.recurring_runs.recurring_run_service_disable_recurring_run(
                recurring_run_id=schedule_id, _request_timeout=_SECONDS
            )

    def delete_schedule(self, schedule_id: str) -> None:
        """Delete a recurring run.

        The runs that it has started stay where the server is new enough (`Release.orphans`); an
        older one ignores that wish, and ends the one that goes on.
        """
        with self._explained(f"delete the schedule {schedule_id}"):
            self._client.recurring_runs.recurring_run_service_delete_recurring_run(
                recurring_run_id=schedule_id, propagation_policy="ORPHAN", _request_timeout=_SECONDS
            )

    def going_on(self, schedule_id: str) -> list[str]:
        """Return the ids of the runs of a recurring run that have not ended."""
        return self.unfinished(self.runs_of(schedule_id))

    @staticmethod
    def unfinished(runs: list[kfp_server_api.V2beta1Run]) -> list[str]:
        """Return the ids of those of the runs that have not ended."""
        return [run.run_id for run in runs if run.state not in _ENDED]

    def runs_of(self, schedule_id: str) -> list[kfp_server_api.V2beta1Run]:
        """Return the runs of a recurring run, with their states; it may be deleted."""
        runs = self._runs("recurring_run_id", schedule_id)
        return [run for run in runs if run.recurring_run_id == schedule_id]

    def runs_named(self, name: str) -> list[kfp_server_api.V2beta1Run]:
        """Return the runs of a name, with their states."""
        return [run for run in self._runs("display_name", name) if run.display_name == name]

    def _runs(self, key: str, value: str) -> list[kfp_server_api.V2beta1Run]:
        by_key = {"predicates": [{"operation": "EQUALS", "key": key, "stringValue": value}]}
        runs: list[kfp_server_api.V2beta1Run] = []
        token = ""
        while True:
            with self._explained(f"list the runs whose {key} is {value}"):
                page = self._client.runs.run_service_list_runs(
                    namespace=self.namespace,
                    filter=json.dumps(by_key),
                    page_size=_PAGE,
                    page_token=token,
                    _request_timeout=_SECONDS,
                )
            runs += page.runs or []
            token = page.next_page_token
            if not token:
                return runs

    def pod_log(self, pod: str, run_id: str) -> str:
        """Return the log of a pod, from the API or else from the UI; nothing where neither has it.

        Args:
            pod: its name.
            run_id: its run.
        """
        query = {"podname": pod, "runid": run_id, "podnamespace": self.namespace}
        parameters = [item for item in query.items() if item[1]]
        # Without a version of its own in v2beta1; the UI may be behind another address.
        return self._text(f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}/log", []) or self._text(
            "/k8s/pod/logs", parameters, self._ui()
        )

    def _text(self, path: str, query: list[tuple[str, str]], host: str = "") -> str:
        """Return a response of plain text; empty where there is none or it is something else."""
        try:
            text = self._client.runs.api_client.call_api(
                path, "GET", query_params=query, response_type="object", auth_settings=["Bearer"],
                _return_http_data_only=True, _request_timeout=_SECONDS, _host=host or None,
            )  # fmt: skip
        except (kfp_server_api.ApiException, urllib3.exceptions.HTTPError, OSError):
            return ""
        # Errors are JSON with status 200; a login page has status 200 too.
        return text if isinstance(text, str) and "<html" not in text.lower() else ""

    def link(self, kind: str, what: str) -> str:
        """Return the address of a run (`runs`) or schedule (`recurringrun`) in the UI."""
        # In a cluster nobody knows under which name people reach its UI.
        return f"{self._ui() or '<Kubeflow Pipelines>'}/#/{kind}/details/{what}"

    def _ui(self) -> str:
        base = os.environ.get(UI) or self._access.host
        if base and not base.startswith(("http://", "https://")):
            base = f"https://{base}"
        return base.rstrip("/")

    def _id_of(self, identifier: str | None) -> str:
        """Return the id of a response; refuse a response without one."""
        if not identifier:
            raise not_the_api(self._where)
        return identifier

    @property
    def _where(self) -> str:
        return f"Kubeflow Pipelines at {self._access.host or 'the cluster of this pod or kubeconfig'}"

    @contextmanager
    def _explained(self, verb: str, *, creates: bool = False) -> Iterator[None]:
        """Turn what the client raises into an error that says what failed and what to do."""
        request = Request(verb, self._where, getattr(self, "namespace", ""), creates)
        try:
            yield
        except kfp_server_api.ApiException as error:
            raise from_response(error, request) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(
                f"cannot {verb}: {self._where} cannot be reached: {str(reason).rpartition(': ')[2]}",
                fix=f"check --host ({HOSTS[0]}) and the network, then try again{request.hint}",
            ) from None


def _check_configured(access: Access) -> None:
    """Refuse to connect where kfp's client would fall back on a guessed address."""
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
