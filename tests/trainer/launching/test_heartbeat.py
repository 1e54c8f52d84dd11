"""A training whose launcher is gone saves its state and ends; one whose launcher is only away does not."""

import json
import threading
import time
from datetime import UTC, datetime

import pytest

from trainer import storage
from trainer.base.clock import Clock
from trainer.base.errors import StorageError
from trainer.launching.heartbeat import EXIT_ABANDONED, Watch, renew_periodically
from trainer.trackers.training_log import read_rows
from trainer.training import checkpoint

LIMIT = 4.0


class JumpingClock(Clock):
    """A clock that stands still until a test moves it."""

    def __init__(self):
        self.seconds = 1000.0

    def monotonic(self):
        return self.seconds

    def now(self):
        return datetime.fromtimestamp(1_700_000_000.0 + self.seconds, UTC)


@pytest.fixture
def clock():
    return JumpingClock()


def beat(path, clock, age=0.0):
    path.write_text(json.dumps({"time": clock.now().timestamp() - age}))


def passes(watch, clock, seconds):
    """Look every second for a while; returns after how many seconds the launcher counted as gone."""
    for second in range(int(seconds) + 1):
        watch.poll()
        if watch.expired:
            return second
        clock.seconds += 1
    return None


@pytest.mark.parametrize("age", [0, 100])
def test_a_heartbeat_that_has_been_seen_to_change_expires_at_the_limit(tmp_path, clock, age):
    watch = Watch(str(tmp_path / "beat"), 180, clock=clock)
    for _ in range(5):  # While it is renewed, the launcher is there.
        beat(tmp_path / "beat", clock)
        assert passes(watch, clock, 100) is None
    beat(tmp_path / "beat", clock, age)  # Another machine's clock does not matter.
    assert passes(watch, clock, 300) == 180


@pytest.mark.parametrize(("age", "expected"), [(0, 180), (100, 80), (170, 60), (100_000, 60), (-3600, 180)])
def test_a_restarted_pod_adds_the_age_of_the_heartbeat_it_finds(tmp_path, clock, age, expected):
    beat(tmp_path / "beat", clock, age)
    assert passes(Watch(str(tmp_path / "beat"), 180, clock=clock), clock, 300) == expected


@pytest.mark.parametrize("content", [None, "", "{}", '{"time": "x"}', "[]"])
def test_a_missing_or_unreadable_heartbeat_expires_as_well(tmp_path, clock, content):
    if content is not None:
        (tmp_path / "beat").write_text(content)
    assert passes(Watch(str(tmp_path / "beat"), 180, clock=clock), clock, 300) == 180


def test_a_store_that_is_away_says_nothing_about_the_launcher(tmp_path, clock):
    def away(uri):
        raise StorageError("away")

    def slow(uri):
        clock.seconds += 600
        return storage.read_bytes(uri)

    read = storage.read_bytes
    watch = Watch(str(tmp_path / "beat"), 180, clock=clock, read=lambda uri: read(uri))
    beat(tmp_path / "beat", clock)
    assert passes(watch, clock, 170) is None
    for read in (away, slow):
        assert passes(watch, clock, 20) is None
        read = storage.read_bytes
        assert passes(watch, clock, 50) is None
        beat(tmp_path / "beat", clock)
        assert passes(watch, clock, 170) is None
    assert passes(watch, clock, 20) is not None


def test_after_an_outage_the_launcher_has_a_third_of_the_limit(tmp_path, clock):
    def away(uri):
        raise StorageError("away")

    read = storage.read_bytes
    watch = Watch(str(tmp_path / "beat"), 180, clock=clock, read=lambda uri: read(uri))
    beat(tmp_path / "beat", clock)
    assert passes(watch, clock, 60) is None
    read = away
    assert passes(watch, clock, 600) is None
    read = storage.read_bytes
    assert passes(watch, clock, 300) == 60


def test_the_heartbeat_is_written_until_the_launcher_ends(tmp_path):
    uri = str(tmp_path / "run" / "beat")
    written = []
    third = threading.Event()

    def sometimes(*arguments):
        written.append(arguments)
        if len(written) == 2:
            raise StorageError("away")
        storage.write_json(*arguments)
        if len(written) == 3:
            third.set()

    with renew_periodically(uri, 0.1, write=sometimes):
        assert third.wait(60)
    count = len(written)
    assert abs(storage.read_json(uri)["time"] - time.time()) < 60
    time.sleep(0.5)
    assert len(written) <= count + 1


def options(path, limit=LIMIT):
    return ("--heartbeat", str(path), "--heartbeat-timeout", str(limit))


ELASTIC = {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_id": "job", "max_restarts": 3}


@pytest.mark.slow
@pytest.mark.extra
def test_two_elastic_nodes_save_and_end_without_the_launcher(node, port, training, tmp_path):
    arguments, output = training
    place = {**ELASTIC, "rdzv_endpoint": f"127.0.0.1:{port}"}
    limit = options(tmp_path / "beat", 20)
    with renew_periodically(str(tmp_path / "beat"), 3.0):
        pair = [node(arguments(train__epochs=2000), *limit, **place) for _ in range(2)]
        for each in pair:
            each.wait_for("launch: waiting for")
        end = time.monotonic() + 240
        while not read_rows(output):
            assert time.monotonic() < end and pair[0].process.poll() is None, pair[0].output
            time.sleep(0.2)
    assert [each.wait() for each in pair] == [EXIT_ABANDONED] * 2, pair[0].output + pair[1].output
    assert any("no heartbeat from the launcher" in each.output for each in pair)
    assert "Traceback" not in pair[0].output + pair[1].output
    trained = [row["step"] for row in read_rows(output) if row["kind"] == "train"]
    assert checkpoint.read_latest(f"{output}/checkpoints")["step"] >= max(trained)


@pytest.mark.slow
def test_a_node_that_waits_for_others_ends_with_its_launcher(node, port, tmp_path):
    """Nodes that wait for a place on the cluster hold GPUs too."""
    place = {"nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": port}
    alone = node(["train"], *options(tmp_path / "beat"), **place)
    assert alone.wait(120) == EXIT_ABANDONED
    assert "no heartbeat from the launcher" in alone.output and "Traceback" not in alone.output
