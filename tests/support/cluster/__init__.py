"""One simulated Kubernetes cluster for all tests of launchers; see `state.py`."""
