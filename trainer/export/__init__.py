"""From a checkpoint to a model for serving, checked in the runtime that serves it."""
