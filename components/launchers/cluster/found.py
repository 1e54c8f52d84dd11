"""Which kinds of jobs a cluster has, which of them a new job becomes, and of which kind a job is."""

import logging

from components.launchers.cluster import objects
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds.kind import Body, Kind
from components.launchers.cluster.refusals import ApiError
from trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_AWAY = ("failed calling webhook", "no endpoints available")
"""What an API server says where nobody listens who must be asked about a job."""


class Kinds:
    """The kinds of a cluster's jobs.

    Args:
        cluster: the cluster and namespace.
        possible: kinds that are thought of, the one that is preferred first.
    """

    def __init__(self, cluster: Cluster, possible: tuple[Kind, ...]) -> None:
        self._cluster, self.possible = cluster, possible
        self._of: dict[str, Kind] = {}
        self._chosen: Kind | None = None
        self._there: Kind | None = None
        """The first that the cluster was found to know."""

    def of_new(self) -> Kind:
        """Return the kind of a new job: the first that the cluster knows and whose controller answers.

        Raises:
            ConfigError: there is none.
            ApiError: the cluster does not say, or forbids it.
        """
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> Kind:
        if len(self.possible) == 1:
            return self.possible[0]
        why: list[str] = []
        forbidden: ApiError | None = None
        for kind in self.possible:
            refusal = self._refusal(kind)
            if refusal is not None and refusal.forbidden:
                forbidden = forbidden or refusal
                why.append(f"  {kind.title}: you may not create them")
                continue
            if problem := _problem(kind, refusal):
                why.append(f"  {kind.title}: {problem}")
                continue
            others = "; ".join(line.strip() for line in why)
            logger.info(
                "jobs are %ss here, of %s%s", kind.title, kind.controller, f" ({others})" if others else ""
            )
            return kind
        if forbidden is not None:
            raise forbidden
        raise _nothing_here(why)

    def trouble(self, kind: Kind) -> str:
        """Say why a job of a kind would not run; nothing where it would.

        A dry run asks the controller, by its webhook, and makes nothing.

        Raises:
            ApiError: the cluster does not say, or has no such namespace.
        """
        return _problem(kind, self._refusal(kind))

    def _refusal(self, kind: Kind) -> ApiError | None:
        try:
            objects.create(self._cluster, kind, kind.probe(), dry_run=True)
        except ApiError as error:
            away = any(words in error.message for words in _AWAY)
            if not away and (error.passing or (error.unknown and 'namespaces "' in error.message)):
                raise
            return error
        return None

    def find(self, name: str, *, patience: float | None = None) -> tuple[Kind, Body | None]:
        """Return a job and its kind; None, and the kind that it had or would have, where there is none.

        Args:
            name: its name.
            patience: as of Cluster.call.

        Raises:
            ApiError: the cluster does not say.
            ConfigError: it knows none of the kinds.
        """
        known = self._of.get(name)
        refused: ApiError | None = None
        answered: Kind | None = None
        for kind in (known,) if known else self.possible:
            try:
                there = objects.get(self._cluster, kind, name, patience=patience)
            except ApiError as error:
                if len(self.possible) == 1 or not (error.unknown or error.status == 403):
                    raise
                if refused is None or refused.unknown:
                    refused = error
                continue
            answered = answered or kind
            if there is not None:
                self._of[name] = kind
                return kind, there
        if refused is not None and answered is None:
            raise self._none(refused)
        self._there = self._there or answered
        return self.kind_of(name), None

    def _none(self, refused: ApiError) -> ApiError | ConfigError:
        if not refused.unknown:
            return refused
        return _nothing_here([f"  {kind.title}: {_problem(kind, refused)}" for kind in self.possible])

    def kind_of(self, name: str) -> Kind:
        """Return the kind of a job that was found or made here before; of any other the one it would have."""
        return self._of.get(name) or self._chosen or self._there or self.possible[0]

    def remember(self, name: str, kind: Kind) -> None:
        """Take note of what a job is that was created."""
        self._of[name] = kind

    def known(self) -> list[tuple[Kind, list[Body]]]:
        """Return the jobs that kubedet made, by kind; kinds that the cluster does not know are left out.

        Raises:
            ApiError: the cluster does not say.
            ConfigError: it knows none of the kinds.
        """
        found: list[tuple[Kind, list[Body]]] = []
        refused: ApiError | None = None
        for kind in self.possible:
            try:
                found.append((kind, objects.ours(self._cluster, kind)))
            except ApiError as error:
                if len(self.possible) == 1 or not (error.unknown or error.status == 403):
                    raise
                if refused is None or refused.unknown:
                    refused = error
        if refused is not None and not found:
            raise self._none(refused)
        return found


def _nothing_here(why: list[str]) -> ConfigError:
    return ConfigError(
        "this cluster runs no training jobs:\n" + "\n".join(why),
        fix="install Kubeflow Trainer (v2.3) or the Training Operator (v1.9), or start what is installed",
    )


def _problem(kind: Kind, refusal: ApiError | None) -> str:
    """Say why a job of a kind would not run, by what the cluster said to a dry run."""
    if refusal is None:
        return ""
    if any(words in refusal.message for words in _AWAY):
        return f"its controller does not answer ({kind.controller})"
    return "the cluster does not know them" if refusal.unknown else ""
