"""Experiment trackers: destinations of a run's metrics besides metrics.jsonl and TensorBoard."""
