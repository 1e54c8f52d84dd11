"""Detectors: networks, losses, postprocessing, recipes and pretrained weights."""
