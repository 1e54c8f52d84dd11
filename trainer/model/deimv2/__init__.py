"""DEIMv2 (Huang et al. 2025, arXiv:2509.20787)."""
