"""Which kinds of jobs a cluster has, which of them a new job becomes, and of which kind a job is."""

import logging
import time

from components.launchers.cluster import job_objects
from components.launchers.cluster.api_errors import ApiError, is_webhook_away
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds.kind import Body, Kind
from trainer.errors import ConfigError

logger = logging.getLogger(__name__)


class Kinds:
    """The kinds of a cluster's jobs.

    Args:
        cluster: the cluster and namespace.
        possible: candidate kinds, the preferred one first.
    """

    def __init__(self, cluster: Cluster, possible: tuple[Kind, ...]) -> None:
        self._cluster, self.possible = cluster, possible
        self._kinds: dict[str, Kind] = {}
        self._chosen: Kind | None = None
        self._answering: Kind | None = None
        """The first kind whose resource the cluster has."""
        self._away: ApiError | None = None
        """Answer of a controller that does not answer."""

    def of_new(self) -> Kind:
        """Return the kind of a new job: the first that the cluster knows and whose controller answers.

        If no controller answers, it waits for one as for an API server that is away.

        Raises:
            ConfigError: there is none.
            ApiError: the cluster does not say, or forbids it.
        """
        timings = self._cluster.timings
        waits, end = timings.waits(), time.monotonic() + timings.outage
        while self._chosen is None:
            chosen = self._choose()
            if isinstance(chosen, ConfigError):
                if self._away is None or time.monotonic() > end:
                    raise chosen
                self._cluster.trouble.tell(self._away.message)
                time.sleep(next(waits))
            else:
                self._chosen = chosen
        return self._chosen

    def _choose(self) -> Kind | ConfigError:
        if len(self.possible) == 1:
            return self.possible[0]
        self._away = None
        problems: list[str] = []
        forbidden: ApiError | None = None
        for kind in self.possible:
            refusal = self._refusal(kind)
            if refusal is not None and refusal.forbidden:
                forbidden = forbidden or refusal
                problems.append(f"  {kind.title}: you may not create them")
                continue
            if problem := _problem(kind, refusal):
                if refusal is not None and is_webhook_away(refusal.message):
                    self._away = refusal
                problems.append(f"  {kind.title}: {problem}")
                continue
            others = "; ".join(line.strip() for line in problems)
            logger.info(
                "jobs are %ss here, of %s%s", kind.title, kind.controller, f" ({others})" if others else ""
            )
            return kind
        if forbidden is not None:
            raise forbidden
        return _nothing_here(problems)

    def trouble(self, kind: Kind) -> str:
        """Return why a job of a kind would not run; empty if it would.

        A dry run calls the controller's webhook and creates nothing.

        Raises:
            ApiError: the cluster does not say, or has no such namespace.
        """
        return _problem(kind, self._refusal(kind))

    def _refusal(self, kind: Kind) -> ApiError | None:
        try:
            job_objects.create(self._cluster, kind, kind.probe(), dry_run=True)
        except ApiError as error:
            if not is_webhook_away(error.message) and (
                error.passing or (error.unknown and 'namespaces "' in error.message)
            ):
                raise
            return error
        return None

    def find(self, name: str, *, patience: float | None = None) -> tuple[Kind, Body | None]:
        """Return a job and its kind; if there is none, None and the kind that it had or would have.

        Args:
            name: its name.
            patience: as of Cluster.call.

        Raises:
            ApiError: the cluster does not say.
            ConfigError: it knows none of the kinds.
        """
        known_kind = self._kinds.get(name)
        refusal: ApiError | None = None
        answered: Kind | None = None
        for kind in (known_kind,) if known_kind else self.possible:
            try:
                job = job_objects.get(self._cluster, kind, name, patience=patience)
            except ApiError as error:
                if len(self.possible) == 1 or not (error.unknown or error.status == 403):
                    raise
                if refusal is None or refusal.unknown:
                    refusal = error
                continue
            answered = answered or kind
            if job is not None:
                self._kinds[name] = kind
                return kind, job
        if refusal is not None and answered is None:
            raise self._error(refusal)
        self._answering = self._answering or answered
        return self.kind_of(name), None

    def _error(self, refusal: ApiError) -> ApiError | ConfigError:
        if not refusal.unknown:
            return refusal
        return _nothing_here([f"  {kind.title}: {_problem(kind, refusal)}" for kind in self.possible])

    def kind_of(self, name: str) -> Kind:
        """Return the kind of a job that this process read or created; of any other that of a new job."""
        return self._kinds.get(name) or self._chosen or self._answering or self.possible[0]

    def remember(self, name: str, kind: Kind) -> None:
        """Remember the kind of a job that was created."""
        self._kinds[name] = kind

    def jobs(self) -> list[tuple[Kind, list[Body]]]:
        """Return the jobs that kubedet made, by kind; kinds that the cluster does not know are left out.

        Raises:
            ApiError: the cluster does not say.
            ConfigError: it knows none of the kinds.
        """
        jobs: list[tuple[Kind, list[Body]]] = []
        refusal: ApiError | None = None
        for kind in self.possible:
            try:
                jobs.append((kind, job_objects.managed(self._cluster, kind)))
            except ApiError as error:
                if len(self.possible) == 1 or not (error.unknown or error.status == 403):
                    raise
                if refusal is None or refusal.unknown:
                    refusal = error
        if refusal is not None and not jobs:
            raise self._error(refusal)
        return jobs


def _nothing_here(problems: list[str]) -> ConfigError:
    return ConfigError(
        "this cluster runs no training jobs:\n" + "\n".join(problems),
        fix="install Kubeflow Trainer (v2.3) or the Training Operator (v1.9), or start what is installed",
    )


def _problem(kind: Kind, refusal: ApiError | None) -> str:
    """Return why a job of a kind would not run, from the refusal of its dry run."""
    if refusal is None:
        return ""
    if is_webhook_away(refusal.message):
        return f"its controller does not answer ({kind.controller})"
    return "the cluster does not know them" if refusal.unknown else ""
