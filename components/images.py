"""The container image that the compiled pipeline names."""

import os
from importlib.metadata import version

# The tag contains the version, so a compiled pipeline keeps the code it was tested with.
COMPONENT_IMAGE = os.environ.get("KUBEDET_IMAGE") or f"kubedet-component:{version('kubedet')}"
"""Runs the steps: the trainer image with kfp. KUBEDET_IMAGE replaces it when the pipeline is compiled."""
