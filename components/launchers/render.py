"""Renders a job's specification as manifests or command lines: pure functions, no requests.

Clusters without a controller of training jobs run an indexed Job: its nodes find each other by torchrun's
c10d rendezvous at pod 0, through a headless Service. Source: Kubernetes, "Jobs" and "DNS for Services".
"""

import shlex

import yaml
from kubernetes.client import (
    V1Job,
    V1JobSpec,
    V1PodFailurePolicy,
    V1PodFailurePolicyOnExitCodesRequirement,
    V1PodFailurePolicyOnPodConditionsPattern,
    V1PodFailurePolicyRule,
    V1Service,
    V1ServicePort,
    V1ServiceSpec,
)

from components.launchers import pod_template, runai
from components.launchers.cluster.kinds import KINDS
from components.launchers.kubernetes_names import LABEL_NAME
from components.launchers.pod_template import Body
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError

TARGETS = ("pytorchjob", "trainjob", "indexed-job", "runai", "runai-submit-dist", "runai-submit-pytorch")
"""A PyTorchJob of the Training Operator, a TrainJob of Kubeflow Trainer, a plain indexed Job, and Run:ai's
commands: of 2.20 and later, of 2.13 to 2.19, and before."""


def render(target: str, job: JobSpec) -> str:
    """Render a job for one of TARGETS: YAML documents, or a command line for a POSIX shell."""
    if target not in TARGETS:
        raise ConfigError(f"unknown target {target!r}", fix=f"use one of: {', '.join(TARGETS)}")
    if not job.image:
        raise ConfigError("the job has no container image", fix="set image")
    if target in KINDS:
        return _to_yaml(KINDS[target].manifests(job, lambda *_: True))
    if target == "indexed-job":
        return _to_yaml(_make_indexed_job(job))
    unsupported = runai.unsupported_fields(job, target)
    lines = [f"# Run:ai's command line has no option for: {', '.join(unsupported)}\n"] if unsupported else []
    command = runai.submit_command(job, target)
    options = command[: command.index("--")]
    lines.append(options[0])
    # One option per line; the command after `--` stays on one line.
    for word in options[1:]:
        if word.startswith("--") and word != "--name":
            lines.append(f" \\\n  {word}")
        else:
            lines.append(f" {shlex.quote(word)}")
    return "".join([*lines, " -- ", shlex.join(command[len(options) + 1 :]), "\n"])


def _to_yaml(manifests: list[Body]) -> str:
    return yaml.safe_dump_all(manifests, sort_keys=False, width=110)


_RETRIED_EXIT_CODES = [130, 134, 135, 137, 139, 143]
"""Exit codes of processes that a signal ended: interrupt, abort, bus error, kill, fault, term."""


def _make_indexed_job(job: JobSpec) -> list[Body]:
    """Return an indexed Job, whose pods are the nodes, and the Service for their host names."""
    metadata = pod_template.job_metadata(job)
    service = V1Service(
        api_version="v1",
        kind="Service",
        metadata=metadata,
        spec=V1ServiceSpec(
            cluster_ip="None",
            # The nodes must find each other before any of them is ready.
            publish_not_ready_addresses=True,
            selector={LABEL_NAME: job.name},
            ports=[V1ServicePort(name="rendezvous", port=pod_template.RENDEZVOUS_PORT)],
        ),
    )
    template = pod_template.make_pod_template(
        job,
        env=pod_template.rendezvous_variables(job, f"{job.name}-0.{job.name}"),
        subdomain=job.name,
        restart_policy="Never",
    )
    # Like the operator: a lost node is replaced, an error of the program fails the Job.
    lost = V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
    codes = V1PodFailurePolicyOnExitCodesRequirement(
        container_name=pod_template.CONTAINER, operator="NotIn", values=_RETRIED_EXIT_CODES
    )
    failures = V1PodFailurePolicy(
        rules=[
            V1PodFailurePolicyRule(action="Ignore", on_pod_conditions=[lost]),
            V1PodFailurePolicyRule(action="FailJob", on_exit_codes=codes),
        ]
    )
    spec = V1JobSpec(
        completion_mode="Indexed",
        completions=job.nodes,
        parallelism=job.nodes,
        backoff_limit=job.backoff * job.nodes,
        pod_failure_policy=failures,
        ttl_seconds_after_finished=job.ttl,
        active_deadline_seconds=job.deadline or None,
        suspend=pod_template.is_suspended(job),
        template=template,
    )
    batch_job = V1Job(api_version="batch/v1", kind="Job", metadata=metadata, spec=spec)
    return [pod_template.to_body(service), pod_template.to_body(batch_job)]
