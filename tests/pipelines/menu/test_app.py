"""The menu, driven by its keys, on a fake API server."""

import asyncio
import threading
import time

import pytest
from fake_api import Fault
from fake_pod import endless
from kinds import plain
from textual.widgets import DataTable, Input, Label, Static

from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings
from pipelines.menu.app import Menu
from trainer.base.errors import ConfigError

NODES = ("new-node-0-0", "new-node-0-1")
FAST = Timings(backoff=0.01, poll=0.05, patience=0.2)


@pytest.fixture
def backend(fake_cluster):
    return ClusterBackend.connect(timings=FAST)


def job(name, nodes=1):
    return JobSpec(name=name, image="i:1", command=("true",), nodes=nodes)


def drive(backend, script):
    """Run a script of keys against the menu."""

    async def run():
        app = Menu(lambda: backend, refresh_seconds=0.05)
        async with app.run_test(size=(120, 40)) as pilot:
            await script(app, pilot)

    asyncio.run(run())


async def until(pilot, condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, screen(pilot.app)
        await pilot.pause(0.02)


def rows(app, table="#jobs"):
    table = app.screen_stack[0].query_one(table, DataTable)
    return [[str(cell) for cell in table.get_row(key)] for key in table.rows]


def details(app):
    return str(app.screen_stack[0].query_one("#details", Static).content)


def done(app):
    return str(app.screen_stack[0].query_one("#done", Static).content)


def screen(app):
    return {
        "jobs": rows(app),
        "pods": rows(app, "#pods"),
        "details": details(app),
        "screens": app.screen_stack,
    }


def test_jobs_and_the_pods_of_the_chosen_one_are_shown_and_kept_up_to_date(backend, fake_cluster):
    fake_cluster.lives |= {"old-master-0": endless, "old-worker-0": endless}
    backend.submit(job("old", nodes=2))

    async def script(app, pilot):
        await until(
            pilot, lambda: rows(app) and rows(app)[0][:5] == ["old", "PyTorchJob", "running", "-", "2/2"]
        )
        await until(pilot, lambda: [row[1] for row in rows(app, "#pods")] == ["old-master-0", "old-worker-0"])
        fake_cluster.pod("old-worker-0").exit(1, message="out of luck")
        await until(pilot, lambda: rows(app)[0][2] == "failed")
        assert "old-worker-0: out of luck" in details(app)

    drive(backend, script)


def test_trainjobs_are_shown_beside_pytorchjobs_and_deleted(backend, fake_cluster):
    fake_cluster.installed = {"pytorchjobs", "trainjobs"}
    fake_cluster.lives |= {"old-master-0": endless, "new-node-0-0": endless, "new-node-0-1": endless}
    backend.submit(job("old"))
    ClusterBackend.connect(timings=FAST, kinds=[KINDS["trainjob"]]).submit(job("new", nodes=2))
    fake_cluster.trainer.progress(fake_cluster.job("new"), 43, 725, loss=0.5)

    async def script(app, pilot):
        shown = {"old": ["PyTorchJob", "running", "-", "1/1"], "new": ["TrainJob", "running", "43%", "2/2"]}
        await until(pilot, lambda: {row[0]: row[1:5] for row in rows(app)} == shown)
        table = app.screen_stack[0].query_one("#jobs", DataTable)
        table.move_cursor(row=[row[0] for row in rows(app)].index("new"))
        await until(pilot, lambda: [plain(row[1]) for row in rows(app, "#pods")] == list(NODES))
        assert "43% done, about 12m5s to go" in details(app)
        fake_cluster.pod(NODES[1]).exit(1, message="out of luck")
        await until(pilot, lambda: "failed" in [row[2] for row in rows(app)])
        await until(pilot, lambda: f"{NODES[1]}: out of luck" in plain(details(app)))
        await pilot.press("d", "y")
        await until(pilot, lambda: [row[0] for row in rows(app)] == ["old"])

    drive(backend, script)


def test_a_failure_catches_the_eye(backend, fake_cluster):
    fake_cluster.lives |= {"good-master-0": endless, "bad-master-0": endless}
    backend.submit(job("good"))
    backend.submit(job("bad"))

    async def script(app, pilot):
        await until(pilot, lambda: [row[2] for row in rows(app)] == ["running", "running"])
        fake_cluster.pod("bad-master-0").exit(1)
        await until(pilot, lambda: "failed" in [row[2] for row in rows(app)])
        table = app.screen_stack[0].query_one("#jobs", DataTable)
        styles = {str(table.get_row(key)[0]): table.get_row(key)[2].style for key in table.rows}
        assert styles == {"good": "green", "bad": "bold red"}

    drive(backend, script)


def test_the_cursor_stays_with_its_job_when_another_comes(backend, fake_cluster):
    fake_cluster.lives |= {f"{name}-master-0": endless for name in ("one", "two", "three")}
    backend.submit(job("one"))
    backend.submit(job("two"))

    async def script(app, pilot):
        await until(pilot, lambda: len(rows(app)) == 2)
        last = rows(app)[1][0]
        await pilot.press("down")
        await until(pilot, lambda: rows(app, "#pods") and rows(app, "#pods")[0][1] == f"{last}-master-0")
        backend.submit(job("three"))
        await until(pilot, lambda: len(rows(app)) == 3)
        await pilot.pause(0.1)
        assert rows(app, "#pods")[0][1] == f"{last}-master-0"

    drive(backend, script)


def test_an_answer_after_the_menu_was_closed_is_dropped(backend):
    app = Menu(lambda: backend, refresh_seconds=0.05)

    async def run():
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: "no jobs here" in details(app))
            await app.query("Static").remove()
            app.on_menu_done(Menu.Done("deleted a"))
            app.on_menu_listed(Menu.Listed([], "no answer"))

    asyncio.run(run())


@pytest.mark.slow
def test_a_job_is_deleted_when_that_is_meant_and_only_then(backend, fake_cluster):
    fake_cluster.lives["a-master-0"] = endless
    backend.submit(job("a"))

    async def script(app, pilot):
        await until(pilot, lambda: rows(app))
        await pilot.press("d", "n")
        await pilot.press("d", "enter")  # The focus is on No.
        await pilot.pause(0.2)
        assert not fake_cluster.requests("DELETE")
        await pilot.press("d", "y")
        await until(pilot, lambda: not rows(app))
        assert "no jobs here" in details(app)

    drive(backend, script)
    assert len(fake_cluster.requests("DELETE", "pytorchjobs/a")) == 1


@pytest.mark.slow
def test_a_job_is_submitted_from_the_form(backend, fake_cluster, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("env: {A: b}\nnodes: 7\n")

    async def script(app, pilot):
        await until(pilot, lambda: "press s" in details(app))
        await pilot.press("s")
        app.screen.query_one("#spec", Input).value = str(file)
        await pilot.press("tab", *"new", "tab", *"i:1", "tab", "2", "tab", "tab", "tab")
        app.screen.query_one("#words", Input).value = "python -c 'print(1)'"
        await pilot.press("enter")
        await until(pilot, lambda: rows(app) and rows(app)[0][0] == "new")

    drive(backend, script)
    body = fake_cluster.requests("POST", "pytorchjobs")[-1].body
    container = body["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert body["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    assert container["command"] == ["python", "-c", "print(1)"]
    assert {"name": "A", "value": "b"} in container["env"]


def test_the_form_says_of_a_field_what_the_specification_says(backend):
    async def script(app, pilot):
        await until(pilot, lambda: "press s" in details(app))
        await pilot.press("s")
        labels = [str(label.content) for label in app.screen.query(Label)]
        assert labels == ["Specification", "Name", "Image", "Nodes", "Processes", "GPUs", "Command"]
        hint = app.screen.query_one("#nproc", Input).placeholder
        assert hint == "processes on each node; 0 is one for each GPU, or one"

    drive(backend, script)


def test_a_form_that_cannot_be_used_says_why_and_sends_nothing(backend, fake_cluster):
    async def script(app, pilot):
        await until(pilot, lambda: "press s" in details(app))
        await pilot.press("s", "tab", *"Bad_Name", "enter")
        problems = str(app.screen.query_one("#problems", Static).content)
        for part in ("name: 'Bad_Name' is not a DNS-1035 label", "image: is missing", "command: is missing"):
            assert part in problems
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)

    drive(backend, script)
    assert not fake_cluster.requests("POST")


@pytest.mark.slow
def test_a_refused_submission_is_told(backend, fake_cluster):
    fake_cluster.denied.add(("create", "pytorchjobs"))

    async def script(app, pilot):
        await until(pilot, lambda: "press s" in details(app))
        await pilot.press("s", "tab", *"a", "tab", *"i", "tab", "tab", "tab", "tab", *"true", "enter")
        await until(pilot, lambda: "forbidden" in done(app))
        assert app.screen_stack[0].query_one("#done").has_class("failed")

    drive(backend, script)


def test_an_api_server_that_is_away_is_told_and_the_jobs_stay(backend, fake_cluster):
    fake_cluster.lives["a-master-0"] = endless
    backend.submit(job("a"))

    async def script(app, pilot):
        await until(pilot, lambda: rows(app))
        fault = Fault("GET", status=503, times=10**6, message="down for a while")
        fake_cluster.faults.append(fault)
        await until(pilot, lambda: "down for a while" in details(app))
        assert rows(app)[0][0] == "a"
        fault.times = 0
        await until(pilot, lambda: "down" not in details(app))

    drive(backend, script)


def test_what_was_done_stands_below_the_tables_and_not_over_them(backend, fake_cluster):
    fake_cluster.lives["a-master-0"] = endless
    backend.submit(job("a"))

    async def script(app, pilot):
        await until(pilot, lambda: rows(app))
        await pilot.press("d", "y")
        await until(pilot, lambda: "deleted a" in done(app))
        await pilot.pause(0.1)
        line = app.screen.query_one("#done")
        assert line.display and line.region.height == 1
        for table in ("#jobs", "#pods"):
            assert not line.region.overlaps(app.screen.query_one(table).region)
        assert not app._notifications

    drive(backend, script)


@pytest.fixture
def ran(monkeypatch):
    """The commands that the menu ran, instead of running them."""
    commands = []
    monkeypatch.setattr(
        "pipelines.menu.app.Menu._run", lambda self, *words, **options: commands.append(words)
    )
    return commands


def test_the_log_of_a_job_that_goes_on_is_followed_and_one_that_failed_is_not(backend, fake_cluster, ran):
    fake_cluster.lives["a-master-0"] = endless
    backend.submit(job("a"))

    async def script(app, pilot):
        await until(pilot, lambda: rows(app) and rows(app)[0][2] == "running")
        await pilot.press("l")
        fake_cluster.pod("a-master-0").exit(1)
        await until(pilot, lambda: rows(app)[0][2] == "failed")
        await pilot.press("l", "tab", "enter")
        assert ran == [
            ("logs", "--follow", "a"), ("logs", "a"), ("logs", "a", "--pod", "a-master-0"),
        ]  # fmt: skip
        fake_cluster.delete_pod(fake_cluster.pod("a-master-0"))
        await until(pilot, lambda: not rows(app, "#pods"))
        await pilot.press("l")
        await until(pilot, lambda: "its pods are gone" in done(app))
        assert len(ran) == 3

    drive(backend, script)


def test_the_menu_shows_before_it_is_connected(backend):
    backend.submit(job("a"))
    connected = threading.Event()

    def connect():
        connected.wait(30)
        return backend

    async def run():
        app = Menu(connect, refresh_seconds=0.05)
        async with app.run_test(size=(120, 40)) as pilot:
            assert "connecting" in details(app) and rows(app) == []
            await pilot.press("l", "d", "e", "enter")  # Nothing to act on yet.
            connected.set()
            await until(pilot, lambda: [row[0] for row in rows(app)] == ["a"])
            assert app.sub_title == "namespace default"

    asyncio.run(run())


def test_the_menu_ends_with_the_error_of_the_connection():
    def connect():
        raise ConfigError("no Kubernetes cluster", fix="set KUBECONFIG")

    async def run():
        app = Menu(connect)
        async with app.run_test() as pilot:
            await until(pilot, lambda: app.return_value is not None)
        return app.return_value

    assert asyncio.run(run()).message == "no Kubernetes cluster"
