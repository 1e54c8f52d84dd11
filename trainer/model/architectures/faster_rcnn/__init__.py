"""Faster R-CNN v2 (Ren et al. 2015, arXiv:1506.01497; Li et al. 2021, arXiv:2111.11429), torchvision's."""
