"""Renders a job's specification as manifests or command lines: pure functions, no requests.

Clusters without a controller of training jobs run an indexed Job: its nodes find each other by torchrun's
c10d rendezvous at pod 0, through a headless Service. Source: Kubernetes, "Jobs" and "DNS for Services".
"""

import shlex

import yaml

from components.launchers import pod_template, runai
from components.launchers.cluster.kinds import KINDS
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
        return _documents(KINDS[target].manifests(job, lambda *_: True))
    if target == "indexed-job":
        return _documents(_indexed_job(job))
    unsupported = runai.left_out(job, target)
    lines = [f"# Run:ai's command line has no option for: {', '.join(unsupported)}\n"] if unsupported else []
    command = runai.command(job, target)
    options = command[: command.index("--")]
    lines.append(options[0])
    # One option a line; what follows `--` stays together: it is another program's.
    for word in options[1:]:
        if word.startswith("--") and word != "--name":
            lines.append(f" \\\n  {word}")
        else:
            lines.append(f" {shlex.quote(word)}")
    return "".join([*lines, " -- ", shlex.join(command[len(options) + 1 :]), "\n"])


def _documents(manifests: list[Body]) -> str:
    return yaml.safe_dump_all(manifests, sort_keys=False, width=110)


_RETRIED_EXIT_CODES = [130, 134, 135, 137, 139, 143]
"""Exit codes of processes that a signal ended: interrupt, abort, bus error, kill, fault, term."""


def _indexed_job(job: JobSpec) -> list[Body]:
    """Return a plain Job, whose pods are the nodes, and the Service by which they find each other."""
    metadata = pod_template.job_metadata
    service = {
        "clusterIP": "None",
        # The nodes must find each other before any of them is ready.
        "publishNotReadyAddresses": True,
        "selector": {pod_template.LABEL_NAME: job.name},
        "ports": [{"name": "rendezvous", "port": pod_template.PORT}],
    }
    template = pod_template.template(job, env=pod_template.rendezvous(job, f"{job.name}-0.{job.name}"))
    restart = "OnFailure" if job.restart_policy == "OnFailure" else "Never"
    template["spec"] = {"subdomain": job.name, "restartPolicy": restart, **template["spec"]}
    spec: Body = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0 if job.restart_policy == "Never" else job.backoff * job.nodes,
    }
    if job.restart_policy == "ExitCode":
        # As the operator: a lost node is replaced, a program's error fails the Job.
        codes = {"containerName": pod_template.CONTAINER, "operator": "NotIn", "values": _RETRIED_EXIT_CODES}
        lost = [{"type": "DisruptionTarget", "status": "True"}]
        rules = [{"action": "Ignore", "onPodConditions": lost}, {"action": "FailJob", "onExitCodes": codes}]
        spec["podFailurePolicy"] = {"rules": rules}
    spec |= pod_template.limits(job)
    spec["template"] = template
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata(job), "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(job), "spec": spec},
    ]
