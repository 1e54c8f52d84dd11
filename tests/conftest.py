"""What many tests share: a tiny data set and a detector small enough for a second of CPU."""

import logging
import multiprocessing
import os
import signal
import sys
from itertools import chain, groupby, islice

import pytest
import torch
from filelock import FileLock

from trainer.data.download import download
from trainer.data.shards import shard
from trainer.export.export import export
from trainer.model import recipes
from trainer.training.loop import train

pytest_plugins = ["cluster.fixtures", "cluster.kfp"]

TINY = {
    "loader.image_size": 96,
    "loader.workers": 1,
    "loader.brightness": 0.2,
    "model.backbone_width": 8,
    "model.fpn_channels": 16,
    "model.head_depth": 1,
    "model.anchor_sizes": [8.0, 16.0, 32.0, 48.0, 64.0],
    "train.epochs": 2,
    "train.batch_size": 4,
    "train.log_every": 1,
    "train.validate_every": 1,
    "train.checkpoint_minutes": 0.0,
    "export.check_images": 4,
}
"""Overrides of the debug recipe: twelve optimizer steps in about a second."""

# Tests start hundreds of processes: without bytecode each would compile torch and kfp anew, which doubles the
# processor time of the import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests run side by side; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# A shell ignores it for what it starts in the background, and so would all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
multiprocessing.set_forkserver_preload(["trainer.training.loop"])


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests that are marked `extra`")


@pytest.hookimpl(trylast=True)  # What is deselected is not here any more.
def pytest_collection_modifyitems(config, items):
    """Leave out what not every change needs, and let slow tests begin."""
    chosen = config.option.all or "extra" in config.option.markexpr
    if not chosen and config.args == config.getini("testpaths"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("extra")])
        items[:] = [item for item in items if not item.get_closest_marker("extra")]
    _slow_first(items)


def _slow_first(items):
    """Of tests side by side let each process begin with slow ones: the quick ones even out the end.

    For pytest-xdist's `worksteal`, which gives each process as many of them, in this order.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    parts = [[] for _ in range(workers)]
    slow = [item for item in items if item.get_closest_marker("slow")]
    for number, (_, of_a_file) in enumerate(groupby(slow, key=lambda item: item.path)):
        parts[number % workers] += of_a_file
    quick = (item for item in items if not item.get_closest_marker("slow"))
    for part in parts:
        part += islice(quick, max(0, len(items) // workers - len(part)))
    items[:] = chain(*parts, quick)


@pytest.fixture
def kubedet(capsys):
    from kubedet import cli

    def run(*words):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def _log_handlers_end_with_their_test():
    """A command in the test's process sends its log to the test's stderr, which is closed then."""
    yield
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _environment_is_read_again():
    """Open buckets and connections again in each test."""
    for name, function in (("objects", "forget_locations"), ("web", "reset_clients")):
        if module := sys.modules.get(f"trainer.storage.{name}"):
            getattr(module, function)()
    if web := sys.modules.get("trainer.storage.web"):
        web.allowed_places.clear()  # Of the process: a set that another test read must allow nothing here.


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Let one of the processes that run tests make a folder of a name, which all of them read."""
    common = tmp_path_factory.getbasetemp()
    common = common.parent if "PYTEST_XDIST_WORKER" in os.environ else common

    def once(name, make):
        folder = common / name
        with FileLock(common / f"{name}.lock"):
            if not (common / f"{name}.made").exists():
                make(folder)
                (common / f"{name}.made").touch()
        return folder

    return once


@pytest.fixture(scope="session")
def tiny():
    """The debug recipe, tiny, with further overrides."""
    return lambda **overrides: recipes.load(
        "debug", {**TINY, **{key.replace("__", "."): value for key, value in overrides.items()}}
    )


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    """A data root that this test process has to itself."""
    return str(tmp_path_factory.mktemp("data_root"))


@pytest.fixture(scope="session")
def shards(data_root):
    """URI of the shards of 24 training and 4 + 4 held-out images of the built-in sample."""
    config = recipes.load("debug", {"data.processes": 1}).data
    raw = download("sample:images=24,seed=3,size=96", data_root, config)
    return shard(raw, data_root, config).uri


@pytest.fixture(scope="session")
def trained(made_once, shards, tiny):
    """URI of a checkpoint of a short training, which says enough to be compared."""
    config = tiny(train__epochs=8, train__validate_every=8, model__score_threshold=0.03)
    return str(made_once("shared_training", lambda folder: train(config, shards, str(folder))) / "best.pt")


@pytest.fixture(scope="session")
def exported(made_once, trained, shards, tiny):
    """Folder of the bundle of that checkpoint in every format."""
    config = tiny(export__formats=["onnx", "onnx-int8", "raw"], export__max_ap_change_int8=1.0)
    return made_once("shared_model", lambda folder: export(trained, shards, str(folder), config))
