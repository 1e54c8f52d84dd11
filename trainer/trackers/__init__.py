"""Sends a run's metrics to experiment trackers, in addition to metrics.jsonl and TensorBoard."""
