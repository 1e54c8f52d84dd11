"""Hyper-parameter search: `kubedet tune`, on one machine or as a run of Kubeflow with a pod per trial."""
