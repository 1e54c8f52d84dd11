"""Processes of a training run: torchrun, stop signals, worker failures and the launcher's heartbeat."""
