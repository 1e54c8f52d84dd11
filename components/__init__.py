"""The pipeline's steps: one thin Kubeflow component a file, and the launchers of training jobs.

A component's body runs alone, in another process or pod: it imports what it needs inside
the function and hands the work to `trainer`.
"""
