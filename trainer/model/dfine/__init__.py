"""D-FINE (Peng et al. 2024, arXiv:2410.13842) and RT-DETRv2 (Lv et al. 2024, arXiv:2407.17140)."""
