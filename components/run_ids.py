"""The id of the run that a step belongs to, which its environment tells.

In a cluster it is a label of the pod, on one machine the run's name. It is no argument of the steps of the
data: what they make does not depend on it.
"""

import os

VARIABLE = "KUBEDET_RUN_ID"

LABEL = "pipeline/runid"
"""Label of a run's pods in Kubeflow; its value is the run's id."""


def current() -> str:
    """Return the id of the run that this process works for; "" where it belongs to none."""
    return os.environ.get(VARIABLE, "").strip()
