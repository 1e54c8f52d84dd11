"""Trackers of experiments: where a run's metrics go besides metrics.jsonl and TensorBoard, if anywhere.

`experiment_tracking.py` chooses them and sends them what the run notes down, in a thread that no training
waits for; `mlflow_tracker.py` and `wandb_tracker.py` speak to one each.
"""
