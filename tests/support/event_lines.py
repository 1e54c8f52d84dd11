"""Lines of a training's log that are events."""

from trainer.base import events


def failed(message, exit_code=2):
    return events.Failed(message=message, exit_code=exit_code).model_dump_json()


def resumed(step, steps=900):
    return events.Resumed(step=step, steps=steps).model_dump_json()


def progress(done, total, **fields):
    state = events.Progress(task="train", done=done, total=total, unit="steps", **fields)
    return state.model_dump_json()


def scored(**metrics):
    return events.Scored(metrics={f"coco/{name}": value for name, value in metrics.items()}).model_dump_json()
