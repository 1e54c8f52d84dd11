"""PyTorchJobs in a Kubernetes cluster."""
