"""The pipeline's steps, one Kubeflow component a file, whose bodies import what they need; the launchers."""
