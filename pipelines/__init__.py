"""The pipeline, how it is compiled and run, and the operator's command line.

Importing this package imports neither kfp nor torch: a command that only prints takes no
seconds to start.
"""

NAME = "kubedet"
"""Name of the pipeline."""

TITLES = {
    "prepare": "Prepare the data",
    "train": "Train",
    "evaluate": "Evaluate and decide",
    "export": "Export",
}
"""The steps in order, as people see them."""

ASSIST = {"assist": "Help to prepare the data"}
"""The step of each further pod that prepares the data, at the same time as "prepare"."""

SEARCH = {"trial": "Train a trial", "best": "Choose the best"}
"""The steps that follow the data in a search for hyper-parameters."""

CLEANUP = {"cleanup": "Clean up"}
"""The step that ends every run in a cluster."""
