"""The kinds of training jobs that a cluster may run: a new one is one file here, and one line below."""

from components.launchers.cluster.kinds.kind import Kind
from components.launchers.cluster.kinds.pytorchjob import PyTorchJob
from components.launchers.cluster.kinds.trainjob import TrainJob

KINDS: dict[str, Kind] = {kind.name: kind for kind in (PyTorchJob(), TrainJob())}
"""By name; where a cluster knows several, the first is taken unless the user names another."""
