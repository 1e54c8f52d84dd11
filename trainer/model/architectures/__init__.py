"""The detectors, a file or folder each; `trainer/architectures.py` lists them."""
