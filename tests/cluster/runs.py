"""Runs of the pipeline on a real Kubeflow Pipelines, and what is really there beside them."""

import json
import os
import re
from dataclasses import dataclass, field

from components.jobs import job_name
from tests.cluster.user import Running, until

CONFIG = {
    "loader.image_size": 96, "loader.workers": 1, "model.backbone_width": 8, "model.fpn_channels": 16,
    "model.head_depth": 1, "model.anchor_sizes": [8.0, 16.0, 32.0, 48.0, 64.0], "train.batch_size": 4,
    "train.validate_every": 1, "train.checkpoint_minutes": 0.0, "data.processes": 1, "export.check_images": 4,
}  # fmt: skip
"""A training of seconds, whose model may be exported."""

JOB = {"shared_memory": "256Mi", "cpu_request": "100m", "memory_request": "256Mi"}
LABEL = "pipeline/runid"
MINUTES = 20 * 60.0
"""Seconds that a run may take on a slow machine."""

KILL = """
import os, signal, sys
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
steps = [pid for pid in os.listdir("/proc") if pid.isdigit() and b"executor_main" in open(f"/proc/{pid}/cmdline", "rb").read()]
work = [pid for pid in steps if str(parent(pid)) in steps and not any(str(parent(one)) == pid for one in steps)]
victim = parent(work[0]) if sys.argv[1] == "main" else int(work[0])
os.kill(victim, signal.SIGKILL)
print("killed", victim)
"""  # noqa: E501
"""Kills the process that does a step's work, or the main one, its parent, which waits for it."""


@dataclass
class Runs:
    """Runs of one test, on one Kubeflow Pipelines."""

    host: str
    cluster: object
    work: str
    begun: list = field(default_factory=list)

    def parameters(self, epochs=3, source="sample:images=48,seed=3,size=96", alone=False, **more):
        """The pipeline's parameters for a training of a few seconds, or for the data alone."""
        parameters = {
            "source": source,
            "data_root": self.work,
            "overrides": {**CONFIG, "train.epochs": epochs},
            "image": os.environ["KUBEDET_IMAGE"],
            "job": JOB,
            "gate": "coco/AP >= 0",
            "launcher": self.cluster.kind.name,
            **more,
        }
        for name in ("image", "gate") if alone else ():
            del parameters[name]
        if os.environ.get("KUBEDET_PVC"):
            parameters["claim"] = os.environ["KUBEDET_PVC"]
        if os.environ.get("KUBEDET_CREDENTIALS"):
            parameters.setdefault("credentials", os.environ["KUBEDET_CREDENTIALS"])
        return parameters

    def submit(self, *words, verb="submit", **parameters):
        """Start `kubedet submit --wait` (or another verb); returns at once."""
        options = ["--wait"] if verb == "submit" else []
        for name, value in self.parameters(**parameters).items():
            if name == "overrides":
                options += [w for key, one in value.items() for w in ("--set", f"{key}={json.dumps(one)}")]
            elif name == "job":
                texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in value.items()}
                options += [w for key, text in texts.items() for w in ("--job", f"{key}={text}")]
            else:
                options += [f"--{name.replace('_', '-')}", str(value)]
        self.begun.append(
            Running([*verb.split(), "--host", self.host, *options, *words], env=steps_environment())
        )
        return self.begun[-1]

    def id_of(self, command):
        """The id of the run that a command has begun."""
        command.wait_for("run ")
        pattern = re.compile(r"^run ([0-9a-f-]{36})$")
        matches = until(lambda: [m[1] for line in command.lines if (m := pattern.match(line))], f"{command}")
        return matches[0]

    def client(self):
        """kfp's own client."""
        import kfp

        return kfp.Client(host=self.host)

    def ended(self, schedule_id, count):
        """The first runs of a schedule in the order of their beginning, once so many have ended."""
        every = self.client().list_runs(page_size=50, sort_by="created_at desc").runs or []
        ours = [run for run in every if run.recurring_run_id == schedule_id]
        ended = [run for run in ours if run.state in ("SUCCEEDED", "FAILED", "CANCELED")]
        return sorted(ended, key=lambda run: run.created_at)[:count] if len(ended) >= count else None

    def pods(self, run_id):
        """Pods of a run by the name of their node in the workflow, e.g. root.steps.train.executor."""
        pods = self.cluster.core.list_namespaced_pod(
            self.cluster.namespace, label_selector=f"{LABEL}={run_id}"
        )
        named = {pod.metadata.annotations["workflows.argoproj.io/node-name"]: pod for pod in pods.items}
        return {node.partition(".")[2]: pod for node, pod in named.items()}

    def pod(self, run_id, step):
        """The running pod of a step; waits for it."""

        def running_pod():
            for node, pod in self.pods(run_id).items():
                if f".{step}(" in node and "executor" in node and pod.status.phase == "Running":
                    return pod.metadata.name
            return None

        return until(running_pod, f"a running pod of {step}", MINUTES)

    def log(self, run_id, step):
        """What a step's pods have printed, all attempts."""
        core, namespace = self.cluster.core, self.cluster.namespace
        names = [
            pod.metadata.name
            for node, pod in self.pods(run_id).items()
            if f".{step}(" in node and "executor" in node and pod.status.phase != "Pending"
        ]
        return "\n".join(core.read_namespaced_pod_log(name, namespace, container="main") for name in names)

    def trains(self, run_id, step="train"):
        """Wait until the job of a run's step has a running pod; returns the job's name."""
        name = job_name(run_id, step)
        until(lambda: self.cluster.job(name) or self.is_over(run_id), f"the job {name}", MINUTES)
        assert self.cluster.job(name), f"the run ended, and the job {name} is not there"
        pods = self.cluster.pods
        until(lambda: any(pod.status.phase == "Running" for pod in pods(name)), f"pods of {name}", MINUTES)
        return name

    def is_over(self, run_id):
        """Whether a run's workflow has ended."""
        workflows = self.cluster.custom.list_namespaced_custom_object(
            "argoproj.io",
            "v1alpha1",
            self.cluster.namespace,
            "workflows",
            label_selector=f"{LABEL}={run_id}",
        )
        return any(flow.get("status", {}).get("finishedAt") for flow in workflows["items"])

    def kill(self, pod, process):
        """Kill the process "work" or "main" of a step in its pod; returns what that said."""
        from kubernetes import stream

        return stream.stream(
            self.cluster.core.connect_get_namespaced_pod_exec,
            pod,
            self.cluster.namespace,
            container="main",
            command=["python", "-c", KILL, process],
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
        )

    def leave(self):
        """End every command, and every run that goes on."""
        for command in self.begun:
            command.kill()


def steps_environment():
    """The environment of a command that compiles: it names the image of the steps."""
    image = os.environ.get("KUBEDET_COMPONENT_IMAGE", os.environ["KUBEDET_IMAGE"])
    return {**os.environ, "KUBEDET_IMAGE": image}
