"""Client of the API of Kubeflow Pipelines, with readable errors.

kfp's client chooses the server (a host, the service of this cluster, or the API server of a kubeconfig) and
the token (from the environment or the pod). Its other calls have neither timeouts nor readable errors, so
the calls of kfp_server_api are used instead.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kfp
import kfp_server_api
import kubernetes
import urllib3
import yaml
from kfp.client import KF_PIPELINES_SA_TOKEN_ENV, KF_PIPELINES_SA_TOKEN_PATH
from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

from pipelines import HOST_VARIABLES, UI_VARIABLE, Access
from pipelines.parameters import Values
from trainer.base.errors import ConfigError, LaunchError

TOKEN_VARIABLE = "KFP_EXISTING_TOKEN"  # noqa: S105 (a name)
"""Variable with a token, as in kfp's command line. The list of processes would show an option."""

_TOKEN_FIX = (
    f"put a token into {TOKEN_VARIABLE}, e.g. from `kubectl create token default-editor --namespace "
    "NAMESPACE --audience pipelines.kubeflow.org`"
)
TESTED_VERSION = "2.17.0"

OLDEST_VERSION = (2, 16)
"""Earlier versions refuse `literals` in the compiled pipeline, and end the runs of a deleted schedule."""

_TAG = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[-+].*)?")
_MESSAGE_LIMIT = 500  # Maximum length of a message.

_TIMEOUTS = (10, 60)  # Seconds to connect, and to wait for a response.
_PAGE_SIZE = 100

ENDED_STATES = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")  # States of runs that have ended.


def is_cancelled(run: Any) -> bool:
    """Whether a run was or is being cancelled: its states are CANCELING and then FAILED."""
    states = [item.state for item in run.state_history or []]
    while states and states[-1] == "FAILED":
        states.pop()
    return run.state == "CANCELED" or states[-1:] in (["CANCELING"], ["CANCELED"])


class ServiceUnavailable(LaunchError):
    """Kubeflow Pipelines cannot be reached or has an internal error, so the request may succeed later."""


class _Client(kfp.Client):
    """kfp's client, except that it neither retries for half a minute nor writes to the home directory."""

    def _load_config(self, *arguments: Any) -> kfp_server_api.Configuration:
        config = super()._load_config(*arguments)
        config.host = host = config.host.rstrip("/")
        refresh = config.refresh_api_key_hook

        def refresh_token(changed: kfp_server_api.Configuration) -> None:
            refresh(changed)
            # The hook of a kubeconfig removes itself, and the path to the service behind the API server.
            changed.host, changed.refresh_api_key_hook = host, refresh_token

        if refresh is not None:
            config.refresh_api_key_hook = refresh_token
        return config

    def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
        return kfp_server_api.V2beta1GetHealthzResponse(multi_user=bool(self.health.get("multi_user")))

    @cached_property
    def health(self) -> Mapping[str, object]:
        """The server's health response, from which kfp's model would drop the version."""
        health = self.healthzs.api_client.call_api(
            "/apis/v2beta1/healthz",
            "GET",
            header_params={"Accept": "application/json"},
            response_type="object",
            auth_settings=["Bearer"],
            _return_http_data_only=True,
            _request_timeout=_TIMEOUTS,
        )
        if not isinstance(health, dict):
            raise _wrong_server_error(f"Kubeflow Pipelines at {self.healthzs.api_client.configuration.host}")
        return health

    def set_user_namespace(self, namespace: str) -> None:
        self._context_setting["namespace"] = namespace


class Server:
    """A Kubeflow Pipelines server. All methods raise a KubedetError if a request fails."""

    def __init__(self, access: Access) -> None:
        if access.ca and not Path(access.ca).is_file():
            raise ConfigError(f"--ca {access.ca} is not a file", fix="pass a PEM file with the certificate")
        if not access.host and not os.environ.get("KUBERNETES_SERVICE_HOST"):
            try:  # kfp's client would guess an address.
                kubernetes.config.load_kube_config(client_configuration=kubernetes.client.Configuration())
            except (kubernetes.config.ConfigException, yaml.YAMLError, OSError) as error:
                problem = f"no host is set, and no kubeconfig is usable: {error}"
                raise ConfigError(
                    f"Kubeflow Pipelines is not configured: {problem}",
                    fix=f"set its URL with --host or {HOST_VARIABLES[0]}; Kubeflow's URL ends with /pipeline",
                ) from None
        self.access = access
        token_file = os.environ.get(KF_PIPELINES_SA_TOKEN_ENV) or KF_PIPELINES_SA_TOKEN_PATH
        projected = ServiceAccountTokenVolumeCredentials() if Path(token_file).exists() else None
        with warnings.catch_warnings(), self._translate_errors("connect"):
            warnings.simplefilter("ignore")  # kfp warns about versions before 2.0.
            self._client = _Client(
                host=access.host or None,
                existing_token=os.environ.get(TOKEN_VARIABLE, "").strip() or None,
                credentials=projected,
                ssl_ca_cert=access.ca or None,
            )
            health = self._client.health
        if access.namespace and not health.get("multi_user"):
            ignored = f"{self._location} is for a single user: the namespace {access.namespace} is ignored"
            print(f"warning: {ignored}", file=sys.stderr)
            self.access = replace(access, namespace="")
        self.namespace = self.access.namespace or self._client.get_user_namespace() or ""
        self.version = str(health.get("tag_name") or "")  # A custom build may have no version or any text.

    def find_or_create_experiment(self, name: str) -> str:
        """Return the id of the experiment `name`; create it if it does not exist."""
        service, request = self._client.experiments, f"look for the experiment {name}"
        call = service.experiment_service_list_experiments
        if found := self._list_all(request, call, "experiments", "display_name", name):
            return str(found[0].experiment_id)
        body = kfp_server_api.V2beta1Experiment(display_name=name, namespace=self.namespace or None)
        create = service.experiment_service_create_experiment
        return self._create(f"the experiment {name}", create, "experiment_id", experiment=body)

    def create_run(
        self,
        name: str,
        experiment: str,
        package: Mapping[str, object],
        parameters: Values,
        description: str = "",
    ) -> str:
        """Start a run of a compiled pipeline in the experiment with this id; return the id of the run."""
        body = kfp_server_api.V2beta1Run(
            display_name=name,
            experiment_id=experiment,
            pipeline_spec=package,
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=parameters),
            description=description or None,
        )
        call = self._client.runs.run_service_create_run
        return self._create(f"the run {name}", call, "run_id", run=body)

    def read_run(self, run_id: str) -> kfp_server_api.V2beta1Run:
        """Return a run with its state and, in `run_details`, its tasks."""
        api = self._client.runs.api_client
        with self._translate_errors(f"look at the run {run_id}"):
            # Without ML Metadata the API has `tasks` (PipelineTask in its run.proto), and only in this view.
            body = api.call_api(
                f"/apis/v2beta1/runs/{run_id}",
                "GET",
                query_params=[("view", "FULL")],
                auth_settings=["Bearer"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=_TIMEOUTS,
            ).data
        try:
            content = json.loads(body)
            tasks = [
                {
                    "display_name": task.get("display_name") or task.get("name"),
                    "state": task.get("state"),
                    "error": {"message": (task.get("status_metadata") or {}).get("message")},
                }
                for task in content.get("tasks") or []
            ]
        except (ValueError, AttributeError):
            raise _wrong_server_error(self._location) from None
        if tasks:
            content["run_details"] = {"task_details": tasks}
        return api.deserialize(SimpleNamespace(data=json.dumps(content)), "V2beta1Run")

    def stop_run(self, run_id: str) -> None:
        """Stop a run, as *Terminate* does in the UI."""
        self._call(f"stop the run {run_id}", self._client.runs.run_service_terminate_run, run_id=run_id)

    def list_schedules(self) -> list[kfp_server_api.V2beta1RecurringRun]:
        """Return the recurring runs of the namespace."""
        call = self._client.recurring_runs.recurring_run_service_list_recurring_runs
        return self._list_all("list the schedules", call, "recurring_runs")

    def create_schedule(self, body: kfp_server_api.V2beta1RecurringRun) -> str:
        """Create a recurring run; return its id."""
        call = self._client.recurring_runs.recurring_run_service_create_recurring_run
        return self._create(f"the schedule {body.display_name}", call, "recurring_run_id", recurring_run=body)

    def change_schedule(self, verb: str, schedule_id: str) -> None:
        """Enable, disable or delete a recurring run; a run that it has started continues."""
        call = getattr(self._client.recurring_runs, f"recurring_run_service_{verb}_recurring_run")
        if verb == "delete":
            call = partial(call, propagation_policy="ORPHAN")
        self._call(f"{verb} the schedule {schedule_id}", call, recurring_run_id=schedule_id)

    def find_runs(self, key: str, value: str) -> list[kfp_server_api.V2beta1Run]:
        """Return the runs with this `recurring_run_id` (it may be deleted) or `display_name`."""
        call, request = self._client.runs.run_service_list_runs, f"list the runs whose {key} is {value}"
        return self._list_all(request, call, "runs", key, value)

    def _list_all(
        self, request: str, call: Callable[..., Any], field: str, key: str = "", value: str = ""
    ) -> list[Any]:
        """Return all items of a listing, or those whose `key` has a value."""
        items: list[Any] = []
        arguments: Values = {"namespace": self.namespace, "page_size": _PAGE_SIZE, "page_token": ""}
        if key:
            predicate = {"operation": "EQUALS", "key": key, "stringValue": value}
            arguments["filter"] = json.dumps({"predicates": [predicate]})
        while True:
            page = self._call(request, call, **arguments)
            items += getattr(page, field) or []
            arguments["page_token"] = page.next_page_token
            if not page.next_page_token:
                return [item for item in items if not key or getattr(item, key) == value]

    def _create(self, title: str, call: Callable[..., Any], field: str, **arguments: Any) -> str:
        """Create an object, and return its id, which is the `field` of the response."""
        identifier = getattr(self._call(f"create {title}", call, creates=True, **arguments), field)
        if not identifier:
            raise _wrong_server_error(self._location)
        return str(identifier)

    def _call(self, verb: str, call: Callable[..., Any], *, creates: bool = False, **arguments: Any) -> Any:
        with self._translate_errors(verb, creates=creates):
            return call(**arguments, _request_timeout=_TIMEOUTS)

    def link(self, kind: str, item_id: str) -> str:
        """Return the address of a run (`runs`) or schedule (`recurringrun`) in the UI."""
        base = (os.environ.get(UI_VARIABLE) or self.access.host).rstrip("/")
        if base and not base.startswith(("http://", "https://")):
            base = f"https://{base}"
        # Inside the cluster, the public URL of the UI is unknown.
        return f"{base or '<Kubeflow Pipelines>'}/#/{kind}/details/{item_id}"

    @property
    def _location(self) -> str:
        return f"Kubeflow Pipelines at {self.access.host or 'the cluster of this pod or kubeconfig'}"

    @contextmanager
    def _translate_errors(self, verb: str, *, creates: bool = False) -> Iterator[None]:
        """Convert exceptions of the client to KubedetErrors."""
        hint = "; look at the UI first: the request may have succeeded" if creates else ""
        try:
            yield
        except kfp_server_api.ApiException as error:
            body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
            is_page = body.lstrip().startswith("<")  # A login page, or the XML of an object store.
            try:
                response = json.loads(body)
                message = response.get("message") or response.get("error") or ""
            except (ValueError, AttributeError):  # Not a JSON object.
                message = "" if is_page else body.strip()
            text = f"cannot {verb}: {self._location} answers {error.status} {error.reason or ''}".rstrip()
            text += f": {str(message)[:_MESSAGE_LIMIT]}" if message else ""
            if error.status in (408, 429) or error.status >= 500:
                fix = f"try again later{hint}; the log of ml-pipeline has more details"
                raise ServiceUnavailable(text, fix=fix) from None
            if is_page:
                raise _wrong_server_error(text) from None
            namespace = getattr(self, "namespace", "")
            of = f"the namespace {namespace}" if namespace else "your namespace"
            remedies = {
                0: "if your own authority signed the server's certificate, give --ca FILE",
                401: _TOKEN_FIX,
                403: f"name a --namespace that you may use, or request the role kubeflow-edit in {of}",
                404: "check the name, and --host: Kubeflow's URL ends with /pipeline",
            }
            other = "correct what the message names; Kubeflow with several users needs --namespace"
            raise ConfigError(text, fix=remedies.get(error.status, other)) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServiceUnavailable(
                f"cannot {verb}: {self._location} cannot be reached: {str(reason).rpartition(': ')[2]}",
                fix=f"check --host ({HOST_VARIABLES[0]}) and the network, then try again{hint}",
            ) from None


def check_version(tag: str) -> str:
    """Return a warning about a server's version; empty for the tested one."""
    match = _TAG.fullmatch(tag)
    if not match:
        return f"unknown version ({tag or 'none reported'}); tested with {TESTED_VERSION}"
    if tuple(int(part or 0) for part in match.groups()) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise ConfigError(
            f"Kubeflow Pipelines {tag} is too old: this pipeline needs {oldest} or later",
            fix=f"upgrade Kubeflow Pipelines to {TESTED_VERSION}; `kubedet job` works without it",
        )
    return "" if tag.removeprefix("v") == TESTED_VERSION else f"version {tag} was not tested"


def _wrong_server_error(found: str) -> ConfigError:
    """Return the error for a response that is not the API's, such as a login page."""
    return ConfigError(
        f"{found}: this is not the API of Kubeflow Pipelines",
        fix=f"if it is a login page, {_TOKEN_FIX}; otherwise correct --host: Kubeflow's URL ends "
        "with /pipeline",
    )
