"""Training: the loop, its step, state and checkpoints."""
