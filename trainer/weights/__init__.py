"""Published weights: what a URI names, and how its files come near, whole and once.

published_weights.py   what a URI names: files of torchvision, of the Hugging Face hub, of any web server
weights_mirror.py      <data_root>/weights: looked into, filled, listed
weight_files.py        the files of some weights on this machine, and the tensors in them
"""
