"""The detectors, a file or folder each; `trainer/config/architectures.py` lists them."""
