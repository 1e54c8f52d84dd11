"""Training jobs of any kind in one namespace of a cluster."""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from components.launchers.backend import Backend, JobStatus, LogLine, Phase, PodStatus, Timings
from components.launchers.cluster import client, job_objects, kueue, own_pod, pod_exec, pods
from components.launchers.cluster.client import ApiError
from components.launchers.cluster.job_objects import Kinds
from components.launchers.cluster.kinds import KINDS, Kind
from components.launchers.cluster.logs import MergedLogs, PodLog
from components.launchers.cluster.own_pod import OwnPod
from components.launchers.cluster.termination import start_deletion_guard
from components.launchers.kubernetes_names import LABEL_SPEC
from components.launchers.pod_template import Body
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError, LaunchError
from trainer.launching import job_status

logger = logging.getLogger(__name__)

_ALL_KINDS = tuple(KINDS.values())
_MAX_TRIES = 5  # Attempts to create a job, in case its name is deleted and reused concurrently.
_PROGRESS_LINES = 200  # Lines at the end of a log; a validation may print many.
_TAIL_LINES = 100  # Last lines to show of a failed pod other than rank 0.


class ClusterBackend(Backend):
    """Runs jobs in one namespace of a cluster; new jobs have the first of `kinds` that the cluster runs."""

    def __init__(
        self,
        cluster: client.Cluster,
        kinds: Iterable[Kind] = _ALL_KINDS,
        start_guard: Callable[..., Any] = start_deletion_guard,
    ) -> None:
        self.cluster, self.timings, self.clock = cluster, cluster.timings, cluster.clock
        self.kinds = Kinds(cluster, tuple(kinds))
        self._queues = kueue.Queues(cluster)
        self._own: OwnPod | None = None
        self._start_guard = start_guard
        self._submitted: dict[str, tuple[str, str]] = {}  # Hash and uid of each job.
        self._histories: dict[str, pods.PodHistory] = defaultdict(lambda: pods.PodHistory(cluster))

    @classmethod
    def connect(
        cls, namespace: str = "", *, kinds: Iterable[Kind] = _ALL_KINDS, timings: Timings | None = None
    ) -> "ClusterBackend":
        """Return a backend for the cluster of the kubeconfig or of this pod; see `client.connect`."""
        return cls(client.connect(namespace, timings=timings), kinds)

    @property
    def place(self) -> str:
        """Location of the jobs, for messages."""
        return f"namespace {self.cluster.namespace}"

    @property
    def options(self) -> str:
        return f" -n {self.cluster.namespace}"

    def submit(self, job: JobSpec) -> str:
        """See `Backend.submit`; namespace, image and queue default to those of this pod.

        Adopts an existing job of that name if it is the same and has not failed; otherwise deletes it first.
        Jobs that kubedet did not create are not touched.
        """
        own = self._own = own_pod.read_own_pod(self.cluster)
        namespace = self.cluster.namespace
        if job.namespace not in ("", namespace):
            raise ConfigError(
                f"the job's namespace is {job.namespace}, but this launcher uses {namespace}",
                fix="use the same namespace in both, or set only one",
            )
        queue = job.kueue_queue or own.queue
        job = replace(job, namespace=namespace, image=job.image or own.image, kueue_queue=queue)
        if not job.image:
            raise ConfigError("the job has no container image", fix="set image")
        if workflow := self._workflow():
            resources = [kind.resource for kind in self.kinds.possible]
            configuration = self.cluster.api.configuration
            self._start_guard(configuration, namespace, workflow["name"], own.name, resources, job.name)
        # Until the uid is known: a stop signal may come at any moment.
        self._submitted[job.name] = job.fingerprint, ""
        self._submitted[job.name] = job.fingerprint, self._create_or_adopt(job)
        return job.fingerprint

    def _create_or_adopt(self, job: JobSpec) -> str:
        """Return the uid of the created or adopted job."""
        manifests: list[Body] = []
        lost: ApiError | None = None  # The response did not arrive, but the job may have been created.
        for _ in range(_MAX_TRIES):
            try:
                kind, existing = self.kinds.find(job.name)
            except ApiError:
                if lost is None:
                    raise
                lost.message += f"; whether the {kind.title} {job.name} was created is not known"
                lost.fix = f"see `kubedet job status {job.name}`; `kubedet job stop {job.name}` deletes it"
                raise lost from None
            if existing is not None and self._adopts(kind, existing, job):
                uid = str(existing["metadata"]["uid"])
                if manifests:  # This process created it.
                    job_objects.add_owner(self.cluster, manifests, uid)
                return uid
            if lost:
                raise lost
            old, old_uid = kind, existing["metadata"]["uid"] if existing is not None else ""
            kind, manifests = self._manifests(job)
            job_objects.delete_job(self.cluster, old if old_uid else kind, job.name, old_uid)
            try:
                uid = job_objects.create_all(self.cluster, manifests)
            except ApiError as error:
                if error.transient:
                    lost = error
                elif error.status == 409:
                    self.clock.sleep(next(self.timings.retry_delays()))
                else:
                    raise
            else:
                self.kinds.by_name[job.name] = kind
                logger.info("created %s %s in namespace %s", kind.title, job.name, self.cluster.namespace)
                return uid
        raise lost or LaunchError(
            f"cannot create the job {job.name}: another launcher keeps creating jobs with this name",
            fix="stop the other launcher, or rename the job",
        )

    def stop(self, name: str, *, wait: bool = True) -> None:
        kind, existing = self.kinds.find(name)
        if existing is not None:
            self._check_managed(kind, existing)
        uid = existing["metadata"]["uid"] if existing is not None else ""
        job_objects.delete_job(self.cluster, kind, name, uid, wait=wait)

    def withdraw(self, name: str, *, wait: bool = True) -> None:
        """See `Backend.withdraw`; a job whose uid is known is deleted without reading it first."""
        spec, uid = self._submitted.get(name, ("", ""))
        kind = self.kinds.kind_of(name)
        if not uid:
            kind, existing = self.kinds.find(name)
            if existing is None or job_objects.read_label(existing, LABEL_SPEC) != spec:
                return
            uid = existing["metadata"]["uid"]
        job_objects.delete_job(self.cluster, kind, name, uid, wait=wait, patience=self.timings.stop)

    def deletes_job_on_stop(self) -> bool:
        return own_pod.deletes_job_on_stop(self.cluster, self._own)

    def _workflow(self) -> dict[str, str] | None:
        own = self._own
        return own.workflow if own and own.namespace == self.cluster.namespace else None

    def _manifests(self, job: JobSpec) -> tuple[Kind, list[Body]]:
        kind = self.kinds.kind_of_new_job()

        def exists(plural: str, name: str) -> bool:
            """Whether the object exists; true if RBAC forbids reading it."""
            try:
                body = self.cluster.find(kind.resource._replace(plural=plural), name)
            except ApiError as error:
                if error.status == 403:
                    return True
                raise
            return body is not None and job_objects.is_managed(body)

        manifests = kind.manifests(job, exists)
        if problems := kind.problems(manifests):
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise ConfigError(f"the cluster would change the job:\n{lines}")
        if ignored := kind.unsupported_fields(job):
            logger.warning("a %s does not support: %s", kind.title, ", ".join(ignored))
        if workflow := self._workflow():
            for manifest in manifests:
                manifest["metadata"]["ownerReferences"] = [workflow]
        return kind, manifests

    def _adopts(self, kind: Kind, existing: Body, job: JobSpec) -> bool:
        """Whether to adopt an existing job of that name; otherwise it is replaced."""
        self._check_managed(kind, existing)
        title, name = kind.title, job.name
        if existing["metadata"].get("deletionTimestamp"):
            logger.info("%s %s is being deleted: waiting until it is gone", title, name)
        elif job_objects.read_label(existing, LABEL_SPEC) != job.fingerprint:
            logger.info("%s %s exists with another specification: deleting it", title, name)
        elif kind.state(existing).phase is Phase.FAILED:
            logger.info("%s %s failed: deleting it, to create it again", title, name)
        else:
            logger.info("%s %s exists: adopting it", title, name)
            return True
        return False

    def _check_managed(self, kind: Kind, existing: Body) -> None:
        if not job_objects.is_managed(existing):
            raise LaunchError(
                f"the {kind.title} {existing['metadata']['name']} in namespace {self.cluster.namespace} was "
                "not created by kubedet",
                fix="give the job another name, or ask its owner to delete it",
            )

    def status(self, name: str) -> JobStatus:
        return self._status(name, *self.kinds.find(name), None)

    def follow(self, name: str, *, once: bool = False) -> Iterator[LogLine | JobStatus]:
        timings, history = self.timings, self._histories[name]
        waits, answered = timings.retry_delays(), self.clock.monotonic()
        try:
            with MergedLogs(self.cluster, follow=not once) as logs:
                while True:
                    try:
                        kind, job = self.kinds.find(name, patience=0.0)
                        if job is not None:
                            history.watch(kind, job)
                        status = self._status(name, kind, job, 0.0)
                    except ApiError as error:
                        if not error.transient or self.clock.monotonic() - answered > timings.outage:
                            raise
                        self.cluster.report_trouble(error.message)
                        wait = next(waits)
                    else:
                        yield status
                        for pod in status.pods:
                            if pod.rank == 0 or status.elastic:  # Any pod of an elastic job may be rank 0.
                                logs.follow(pod.name, pod.uid)
                            elif pod.phase == "Failed" or pod.exit_code:
                                logs.follow(pod.name, pod.uid, tail=_TAIL_LINES)
                        if status.phase.final or once:
                            ended = {pod.uid for pod in status.pods if pod.phase in ("Succeeded", "Failed")}
                            yield from logs.drain(timings.drain, ended=None if once or not ended else ended)
                            return
                        waits, answered = timings.retry_delays(), self.clock.monotonic()
                        wait = timings.poll * random.uniform(0.75, 1.25)
                    yield from logs.lines(wait)
        finally:
            self._histories.pop(name, history).stop()

    def pod_lines(self, name: str, pod: PodStatus, *, follow: bool, tail: int = 0) -> Iterator[str]:
        """Yield the log lines of one pod, starting with the last `tail` lines (0: all)."""
        return PodLog(self.cluster, pod.name, pod.uid, tail=tail).lines(follow=follow)

    def execute(self, name: str, pod: PodStatus, arguments: list[str]) -> int:
        """Run a command in a pod with this process's output and terminal; returns the exit code."""
        return pod_exec.run_attached(self.cluster, pod, arguments)

    def list_jobs(self) -> list[JobStatus]:
        """Return the status of kubedet's jobs in the namespace, the newest first."""
        statuses = []
        for kind, jobs in self.kinds.list_jobs():
            by_job: dict[str, list[Any]] = {}
            for pod in pods.list_pods_of_job(self.cluster, kind, "") if jobs else ():
                by_job.setdefault(pod.metadata.labels[kind.pod_label], []).append(pod)
            statuses += [pods.job_status(kind, job, by_job.get(job["metadata"]["name"], [])) for job in jobs]
        has_ended: dict[str, bool] = {}
        for number, status in enumerate(statuses):
            if status.workflow and not status.phase.final:
                with suppress(ApiError):
                    if status.workflow not in has_ended:
                        has_ended[status.workflow] = own_pod.run_has_ended(self.cluster, status.workflow)
                if has_ended.get(status.workflow):
                    statuses[number] = replace(status, orphaned=True, reason="RunEnded")
        return sorted(self._queues.with_reasons(statuses), key=lambda status: status.created, reverse=True)

    def with_progress(self, status: JobStatus) -> JobStatus:
        """Return a running job's status with the progress from its log, if there is one."""
        if status.phase is not Phase.RUNNING:
            return status
        for pod in status.pods:
            # Any pod of an elastic job may have rank 0; only its log has the progress.
            if pod.phase == "Running" and (pod.rank == 0 or status.elastic):
                # Progress is optional: the log may be forbidden or not readable now.
                with suppress(ApiError):
                    lines = self.pod_lines(status.name, pod, follow=False, tail=_PROGRESS_LINES)
                    if progress := job_status.read_progress(lines):
                        return replace(status, progress=progress)
        return status

    def explain(self, status: JobStatus) -> list[str]:
        if status.phase is Phase.SUSPENDED:
            if status.reason not in (kueue.UNSERVED, kueue.ADMITTED):
                return []
            try:
                return [str(kueue.find_installed(self.cluster))]
            except ApiError as error:
                return [f"the installed Kueue is not known: {error.message}"]
        lines = []
        kind = self.kinds.kind_of(status.name)
        if not status.pods:
            lines.append(f"no pod was created: check {kind.controller}, and the quota of the namespace")
        elif len(status.pods) < status.nodes:
            lines.append(f"{len(status.pods)} of {status.nodes} pods exist")
        for pod in status.pods:
            if pod.phase not in ("Running", "Succeeded"):
                lines.append(f"pod {pod.name} is {pod.phase}{pods.describe_reason(pod)}")
                lines += [f"  the previous pod or container ended: {pod.before}"] if pod.before else []
                lines += [f"  {line}" for line in pods.describe_events(self.cluster, "Pod", pod.name)]
        for title, name in kind.event_objects(status.name):
            lines += pods.describe_events(self.cluster, title, name)
        return lines

    def _status(self, name: str, kind: Kind, job: Body | None, patience: float | None) -> JobStatus:
        if job is None:
            return JobStatus(name, Phase.GONE, kind=kind.title)
        job_pods = pods.list_pods_of_job(self.cluster, kind, name, patience=patience)
        status = self._histories[name].with_restarts(pods.job_status(kind, job, job_pods))
        if status.phase in (Phase.PENDING, Phase.RESTARTING):
            status = self._with_events(kind, status)
        return self._queues.with_reasons([status], patience=patience)[0]

    def _with_events(self, kind: Kind, status: JobStatus) -> JobStatus:
        """Return the status with the reasons from events why pods are missing, and why the first pod without
        a reason of its own does not start.
        """
        reason, cluster = "", self.cluster
        if len(status.pods) < status.nodes and pods.has_waited(status.created, self.clock.now()):
            reason, message = pods.newest_failure(cluster, kind.event_objects(status.name), "Creat")
        elif silent := next(
            (pod for pod in status.pods if pod.phase == "Pending" and not (pod.reason or pod.leaving)), None
        ):
            if pods.has_waited(silent.created, self.clock.now()):
                reason, message = pods.newest_failure(cluster, [("Pod", silent.name)])
            known = replace(silent, reason=reason, message=message) if reason else silent
            status = replace(status, pods=tuple(known if pod is silent else pod for pod in status.pods))
        return replace(status, reason=reason, message=message) if reason else status
