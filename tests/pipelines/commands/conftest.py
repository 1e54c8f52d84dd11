"""What the tests of the commands share."""

import pytest

from components.launchers.cluster import client
from components.launchers.cluster.pytorchjob import PyTorchJobBackend
from components.launchers.cluster.timings import Timings
from pipelines import cli

FAST = Timings(backoff=0.01, poll=0.05, patience=0.2)


@pytest.fixture
def kubedet(capsys, monkeypatch, fake_cluster):
    """Runs a command line against the fake cluster, in haste; returns exit code, stdout and stderr."""
    hasty = classmethod(lambda cls, namespace="", timings=None: cls(client.connect(namespace, timings=FAST)))
    monkeypatch.setattr(PyTorchJobBackend, "connect", hasty)

    def run(*words):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:  # What argparse does.
            code = end.code
        return code, *capsys.readouterr()

    return run
