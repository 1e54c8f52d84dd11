"""Processes of a training: torchrun, signals, failures of workers, and what a launcher learns of them."""
