"""Published weights: what a URI names, and how its files come near, whole and once.

`published_weights.py` knows what a URI names (a file of torchvision, a model of the Hugging Face hub, a file
of any web server), `weights_mirror.py` keeps them in `<data_root>/weights`, and `weight_files.py` has their
files on this machine and reads the tensors.
"""
