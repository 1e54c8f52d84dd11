"""The pipeline, how it is compiled and run, and the operator's command line.

Importing this package imports neither kfp nor torch: a command that only prints takes no
seconds to start.
"""

NAME = "kubedet"
"""Name of the pipeline."""

TITLES = {
    "download": "Download images",
    "shard": "Write shards",
    "train": "Train",
    "evaluate": "Evaluate",
    "gate": "Decide on export",
    "export": "Export",
}
"""The steps in order, as people see them."""

SHARED = {
    "plan": "Divide the work",
    "fetch": "Fetch a part of the images",
    "write": "Write a part of the shards",
}
"""Further steps of a run in a cluster, by which pods share the work of a step."""

OPTIONAL = {"register": "Register the model"}
"""Steps that a run has only where it asks for them."""
