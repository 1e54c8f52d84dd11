"""The container images that the compiled pipeline names."""

import os
from importlib.metadata import version

# The version stands in the tag: a pipeline compiled earlier keeps the code it was tested with.
TRAINER_IMAGE = f"kubedet-trainer:{version('kubedet')}"
"""Runs `python -m trainer`; has no kfp."""

COMPONENT_IMAGE = os.environ.get("KUBEDET_IMAGE") or f"kubedet-component:{version('kubedet')}"
"""Runs the steps: the trainer image with kfp. KUBEDET_IMAGE replaces it when the pipeline is compiled."""
