"""Lines of a training's log that are events."""

from trainer.base import events


def failed(message, exit_code=2):
    return events.encode(events.ProcessFailed(message=message, exit_code=exit_code)).rstrip()


def resumed(step, steps=900):
    return events.encode(events.TrainingResumed(step=step, steps=steps)).rstrip()


def progress(done, total, **fields):
    state = events.Progress(task="train", done=done, total=total, unit="steps", **fields)
    return events.encode(state).rstrip()


def scored(**metrics):
    return events.encode(
        events.ValidationScored(metrics={f"coco/{name}": value for name, value in metrics.items()})
    ).rstrip()
