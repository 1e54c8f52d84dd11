"""RF-DETR (Robinson et al. 2025, arXiv:2511.09554)."""
