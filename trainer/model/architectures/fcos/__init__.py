"""FCOS (Tian et al. 2019, arXiv:1904.01355 and 2006.09214), torchvision's."""
