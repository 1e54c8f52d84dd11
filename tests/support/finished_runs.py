"""What a training has left in its folder."""

from trainer import checkpoint
from trainer.training_log import read_rows


def losses(output):
    """Loss and gradient norm of each step that a run has logged."""
    return {
        row["step"]: (row["loss"], row["gradient_norm"])
        for row in read_rows(output)
        if row["kind"] == "train"
    }


def final_weights(output):
    """The newest checkpoint of a run."""
    return checkpoint.read_latest(f"{output}/checkpoints")
