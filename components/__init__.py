"""The Kubeflow components, one per file, and the launchers. A component's body imports what it needs."""
