"""RetinaNet (Lin et al. 2017, arXiv:1708.02002) in torchvision's layout."""
