"""A run of the pipeline in a simulated cluster: its Workflow, its train step, the training, and what fails.

run = Run(seed)
run.fail()         # Schedule failures; `run.events` lists what happened.
run.execute()      # Until five minutes after the end of the run; `run.violations` lists what must not happen.
"""

import json
import random
import signal

from event_lines import failed, resumed

from cluster.api import Fault, SimulatedCluster
from cluster.clock import Process
from cluster.fixtures import connect_backend
from cluster.state import JOBS, PODS, TRAINJOBS
from components.launchers.backend import Timings
from components.launchers.cluster import watch
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from trainer.base.errors import EXIT_RETRY, KubedetError, LaunchError, MissingError, StorageError
from trainer.launching import heartbeat

NAME, WORKFLOW = "kubedet-run-train", "run-x"
SPEC = JobSpec(command=("python",), name=NAME, image="i:1", nodes=2)
TIMINGS = Timings(poll=15.0, heartbeat=300.0)
HEARTBEAT, RESULT, CHECKPOINT = "launcher.json", "result.json", "checkpoint"
MINUTES_AFTER = 5
LONGEST = 3600.0  # Seconds of a run.
STEPS = 24  # Of a training; each takes STEP_SECONDS.
STEP_SECONDS = 10.0
DOWN = [
    {"drop": True}, {"status": 500}, {"status": 503}, {"status": 429, "retry_after": 5}, {"status": 410},
    {"delay": 40.0}, {"lost": True},
]  # fmt: skip
"""How an API server that is away answers."""
RETRIES_EXHAUSTED = LaunchError("the step's pod was deleted too often", fix="Retry in Kubeflow")
"""A finished training is not lost then: the next attempt finds its result."""


class Store:
    """The object store: files by name."""

    def __init__(self, clock):
        self._clock = clock
        self.files, self.away, self.unreachable_from = {}, False, set()

    def read(self, name):
        self._connect()
        if name not in self.files:
            raise MissingError(f"{name} does not exist", fix="write it")
        return self.files[name]

    def write_json(self, name, value):
        self._connect()
        self.files[name] = json.dumps(value).encode()

    def _connect(self):
        if self.away or self._clock.process in self.unreachable_from:
            raise StorageError("the store does not answer", fix="look at its log", transient=True)


class Run:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.cluster = SimulatedCluster(seed=seed)
        self.clock = self.cluster.clock
        self.store = Store(self.clock)
        self.kinds = self.random.choice([["pytorchjob"], ["trainjob"], ["pytorchjob", "trainjob"]])
        self.cluster.installed = {KINDS[name].plural for name in self.kinds}
        self.cluster.termination_seconds = self.random.choice([1.0, 15.0, 30.0])
        self.cluster.collection_seconds = self.random.choice([0.5, 10.0])
        self.cluster.lives = {f"{NAME}-{part}": self._train for part in
                              ("worker-0", "worker-1", "node-0-0", "node-0-1")}  # fmt: skip
        self.events, self.violations = [], []
        self.launcher = None  # The process of the launcher.
        self.step_pod = None  # The pod that it runs in.
        self.outcome = None  # The error of the step, or "succeeded".
        self.terminated = self.over = self.broken = False

    def note(self, text):
        self.events.append(f"{self.clock.monotonic():7.1f} s  {text}")

    def violate(self, text):
        self.note(f"VIOLATION: {text}")
        self.violations.append(text)

    # The run.

    def execute(self):
        """Run to five minutes after the end, and check what is left."""
        self.cluster.observer = self._check_change
        self.workflow = self.cluster.add("workflows", "default", {"metadata": {"name": WORKFLOW}, "spec": {}})
        try:
            self._run_step()
            self._clean_up()
            self.note(f"the run ended: {self.outcome}")
            self.workflow.setdefault("status", {})["finishedAt"] = self.cluster.time()
            self.over = True
            self.clock.sleep(60.0 * MINUTES_AFTER)
            self._check_end()
        except TimeoutError as error:
            self.violate(str(error))

    def _run_step(self):
        """Do as Argo does: run the step's pod again if it was deleted."""
        for attempt in range(4):
            self.step_pod = self._add_step_pod(f"step-{attempt}")
            self._run_pod(self.step_pod)
            if self.outcome is not None or self.terminated:
                return
            self.clock.sleep(30.0)
        self.outcome = RETRIES_EXHAUSTED

    def _run_pod(self, pod):
        """Do as the step's supervisor does: start the launcher again if it was killed."""
        while not pod.gone and self.outcome is None:
            self.launcher = launcher = Process(self.clock, self._launch, KFP_POD_NAME=pod.name)
            self._wait(lambda launcher=launcher: pod.gone or (launcher.ended and not launcher.signalled))
            self.clock.sleep(0.0 if pod.gone else 5.0)

    def _add_step_pod(self, name):
        owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": WORKFLOW}
        owner["uid"] = self.workflow["metadata"]["uid"]
        metadata = {"name": name, "ownerReferences": [owner]}
        spec = {"containers": [{"name": "main", "image": "i:1"}]}
        body = self.cluster.add(PODS, "default", {"metadata": metadata, "spec": spec, "status": {}})
        return self.cluster.pods[body["metadata"]["uid"]]

    def _wait(self, holds):
        while not holds():
            if self.clock.monotonic() > LONGEST:
                raise TimeoutError("the run does not end")
            self.clock.sleep(1.0)

    def _backend(self):
        return connect_backend(self.cluster, [KINDS[name] for name in self.kinds], TIMINGS)

    def _launch(self):
        """Do as the train step does, with the retries of its supervisor."""
        process, pod, wait = self.clock.process, self.step_pod, 5.0
        self.note(f"launcher started in {pod.name}")
        for attempt in range(5):
            began = self.clock.monotonic()
            try:
                with heartbeat.renew_periodically(HEARTBEAT, clock=self.clock, write=self.store.write_json):
                    self._train_to_the_end()
                self.outcome = self.outcome if pod.gone else "succeeded"
                return
            except KubedetError as error:
                self.note(f"launcher: {type(error).__name__}: {error.message.splitlines()[0]}")
                self._check_named(error)
                if process.signalled or pod.gone:  # Argo decides what follows.
                    return
                if not error.transient or attempt == 4:
                    self.outcome = error
                    return
            except Exception as error:
                self.violate(f"the launcher raised {type(error).__name__}: {error}")
                self.outcome = error
                return
            wait = 5.0 if self.clock.monotonic() - began > 600 else wait
            self.clock.sleep(wait)
            wait = min(3 * wait, 120.0)

    def _train_to_the_end(self):
        """Do as `components.training.train` does."""
        failure = None
        try:
            watch.run(self._backend(), SPEC, lambda line: None)
        except LaunchError as error:
            failure = error
        try:
            self.store.read(RESULT)
        except MissingError:
            raise failure or LaunchError("the training ended without a result", fix="check its log") from None

    def _clean_up(self):
        """Do as the exit handler does, which Kubeflow does not start for each run that is terminated."""
        if self.terminated and self.random.random() < 0.5:
            return
        for wait in (5.0, 15.0, 45.0, 120.0, 0.0):
            try:
                backend = self._backend()
                if not backend.status(NAME).phase.final:
                    backend.stop(NAME)
                return
            except KubedetError as error:
                self._check_named(error)
                if not error.transient:
                    return
            self.clock.sleep(wait)

    # The training.

    def _train(self, pod):
        """The life of a pod that trains."""
        rank, run = int(pod.base[-1]), self.random
        pod.sleep(run.uniform(1.0, 20.0))
        pod.run()
        monitor = heartbeat.Watch(HEARTBEAT, SPEC.launcher_timeout, clock=self.clock, read=self.store.read)
        step = None
        while True:
            if step is None and not self.store.away:
                step = int(self.store.files.get(CHECKPOINT, 0))
                if rank == 0 and step:
                    pod.say(resumed(step, STEPS))
            pod.until(lambda: pod.leaving, STEP_SECONDS)
            monitor.poll()
            if pod.leaving or self._has_lost_its_peer(pod):
                pod.exit(EXIT_RETRY)
            elif monitor.expired:
                pod.exit(heartbeat.EXIT_ABANDONED)
            elif self.broken and rank == 1:
                pod.say(failed("the loss is nan\n  fix: lower train.lr", 3))
                pod.exit(3)
            elif step is not None and RESULT in self.store.files:
                pod.exit(0)
            elif self.over:
                pass  # A training takes days: none is complete within five minutes.
            elif step is not None and rank == 0 and not self.store.away and self._peers_run(pod):
                step += 1
                pod.say(f"step {step}")
                if step % 3 == 0:
                    self.store.files[CHECKPOINT] = step
                if step >= STEPS:
                    self.store.files[RESULT] = b"{}"
                    self.note("the training is complete")
            if pod.ended:
                return

    def _peers(self, pod):
        owner = pod.body["metadata"]["ownerReferences"][0]["uid"]
        pods = [
            self.cluster.pods[body["metadata"]["uid"]]
            for key, body in self.cluster.objects.items()
            if key[0] == PODS
        ]
        return [
            peer
            for peer in pods
            if peer.body["metadata"]["ownerReferences"][0]["uid"] == owner and peer is not pod
        ]

    def _peers_run(self, pod):
        return any(peer.phase == "Running" for peer in self._peers(pod))

    def _has_lost_its_peer(self, pod):
        """Return whether a process on another node is gone that was there at a step before."""
        present = self._peers_run(pod) or any(peer.phase == "Succeeded" for peer in self._peers(pod))
        had, pod.had_peer = getattr(pod, "had_peer", False), present
        return had and not present

    # What fails.

    def fail(self):
        """Schedule up to eight failures, about half of them close together."""
        faults = [
            self._lose_pod, self._evict_pod, self._delete_pod, self._kill_launcher, self._evict_launcher,
            self._cut_launcher_off, self._take_api_away, self._take_store_away, self._stop_operator,
            self._refuse_once, self._break_streams, self._lose_node,
        ]  # fmt: skip
        rare = [self._terminate, self._delete_run, self._break_training]
        end = STEPS * STEP_SECONDS * 1.5
        moment = self.random.uniform(0.0, end)
        for _ in range(self.random.randint(1, 8)):
            fault = self.random.choice(faults if self.random.random() < 0.85 else rare)
            near = moment + self.random.uniform(0.0, 30.0)
            self.clock.start(self._act, self.random.choice([near, self.random.uniform(0.0, end)]), fault)

    def _act(self, seconds, fault):
        self.clock.sleep(seconds)
        if not self.over:
            self.note(fault.__name__.strip("_").replace("_", " "))
            fault()

    def _pods(self):
        return [pod for pod in self.cluster.pods.values() if pod.base.startswith(NAME)]

    def _a_pod(self):
        pods = [pod for pod in self._pods() if not pod.ended]
        return self.random.choice(pods) if pods else None

    def _lose_pod(self):
        if (pod := self._a_pod()) and pod.phase == "Running":
            pod.exit(self.random.choice([137, 139, 143]))

    def _evict_pod(self):
        if pod := self._a_pod():
            pod.evict()

    def _delete_pod(self):
        if pod := self._a_pod():
            self.cluster.delete_pod(pod, self.cluster.termination_seconds)

    def _lose_node(self):
        for pod in [self._a_pod(), self._a_pod()]:
            if pod and not pod.ended:
                pod.evict("The node is gone.")
        self._evict_launcher()

    def _kill_launcher(self):
        if self.launcher and not self.launcher.ended:
            self.launcher.kill()

    def _evict_launcher(self, grace=30.0):
        launcher, pod = self.launcher, self.step_pod
        if launcher and not pod.gone:
            launcher.signal(signal.SIGTERM)
            self.clock.sleep(grace)
            launcher.kill()
            self.cluster.delete_pod(pod)

    def _cut_launcher_off(self):
        """Cut off its node: Kubernetes removes the pod after a while, and the process goes on."""
        launcher, pod = self.launcher, self.step_pod
        if launcher is None or pod.gone:
            return
        places = (self.cluster.unreachable_from, self.store.unreachable_from)
        for place in places:
            place.add(launcher)
        self.clock.sleep(self.random.uniform(5.0, 90.0))
        if self.random.random() < 0.5:
            self.cluster.delete_pod(pod)
            self.clock.sleep(self.random.uniform(5.0, 120.0))
        for place in places:
            place.discard(launcher)
        if pod.gone:  # The kubelet is back, and ends what is left of it.
            self.clock.sleep(self.random.uniform(0.0, 20.0))
            launcher.signal(signal.SIGTERM)
            self.clock.sleep(30.0)
            launcher.kill()

    def _take_api_away(self):
        times, seconds = 10**9, self.random.uniform(1.0, 180.0)
        faults = [Fault(times=times, **kind) for kind in self.random.sample(DOWN, self.random.randint(1, 2))]
        self.cluster.faults += faults
        self.clock.sleep(seconds)
        for fault in faults:
            fault.times = 0

    def _refuse_once(self):
        kind = self.random.choice(DOWN)
        self.cluster.faults.append(Fault(self.random.choice(["GET", "POST", "DELETE", "PATCH"]), **kind))

    def _take_store_away(self):
        self.store.away = True
        self.clock.sleep(self.random.uniform(1.0, 180.0))
        self.store.away = False

    def _stop_operator(self):
        self.cluster.away = {JOBS, TRAINJOBS}
        self.clock.sleep(self.random.uniform(1.0, 120.0))
        self.cluster.away = set()
        for controller in self.cluster.controllers.values():
            controller.returned()

    def _break_streams(self):
        self.cluster.break_streams()

    def _terminate(self):
        self.terminated = True
        self.workflow["spec"]["activeDeadlineSeconds"] = 0
        self._evict_launcher(grace=self.random.uniform(0.3, 2.0))

    def _delete_run(self):
        self.terminated = True
        if ("workflows", "default", WORKFLOW) in self.cluster.objects:
            self.cluster.remove("workflows", "default", WORKFLOW)
        self._evict_launcher(grace=self.random.uniform(0.3, 30.0))

    def _break_training(self):
        self.broken = True

    # What must hold.

    def _jobs(self):
        return [body for key, body in self.cluster.objects.items() if key[0] in (JOBS, TRAINJOBS)]

    def _check_change(self, kind, body, resource):
        if kind != "ADDED" or resource not in (JOBS, TRAINJOBS, PODS):
            return
        if resource != PODS:
            self.note(f"created the {body['kind']}")
            if len(self._jobs()) > 1:
                self.violate("the run has two jobs")
        elif body["metadata"]["name"].startswith(NAME):
            running = [pod.body for pod in self._pods() if not pod.ended]
            if len({item["metadata"]["ownerReferences"][0]["uid"] for item in [body, *running]}) > 1:
                self.violate("pods of two jobs run at the same time")

    def _check_named(self, error):
        if not error.message or "fix: " not in str(error):
            self.violate(f"an error without a fix: {error.message}")
        if "Traceback" in error.message:
            self.violate(f"an error with a traceback: {error.message}")

    def _check_end(self):
        for job in self._jobs():
            ended = {
                item["type"]
                for item in job.get("status", {}).get("conditions", [])
                if item["status"] == "True"
            }
            if not ended & {"Succeeded", "Complete", "Failed"}:
                self.violate("a job outlives its run")
        if not all(pod.ended for pod in self._pods()):
            self.violate("a pod outlives its run")
        if self.outcome != "succeeded" and not self.terminated:
            if RESULT in self.store.files and self.outcome is not RETRIES_EXHAUSTED:
                self.violate(f"a finished training is lost: {self.outcome}")
            if not self.broken:
                self.violate(f"a run fails without a cause: {self.outcome}")
