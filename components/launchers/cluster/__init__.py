"""Training jobs in a Kubernetes cluster."""
