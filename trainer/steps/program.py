"""Runs a step as a process: `python -m trainer step NAME --input FILE --output FILE`."""

from collections.abc import Callable

from pydantic import ConfigDict, TypeAdapter, ValidationError

from trainer import storage
from trainer.base.errors import ConfigError
from trainer.steps import download, evaluate, export, manifests, shard, train
from trainer.steps.manifests import Manifest

STEPS: dict[str, Callable[..., Manifest]] = {
    "download": download.download,
    "shard": shard.shard,
    "train": train.train_on_this_machine,
    "evaluate": evaluate.evaluate,
    "export": export.export,
}
"""The functions of the steps, by name."""


def run(step: str, input_uri: str, output_uri: str) -> None:
    """Call a step with the arguments in a JSON file, and write the manifest that it returns."""
    call: TypeAdapter[Manifest] = TypeAdapter(STEPS[step], config=ConfigDict(strict=True))  # type: ignore[arg-type]
    try:
        manifest = call.validate_json(storage.read_bytes(input_uri))
    except ValidationError as error:
        problems = [f"  {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ConfigError(
            f"{input_uri} cannot be used:\n" + "\n".join(problems), fix="correct these arguments"
        ) from None
    manifests.write(output_uri, manifest)
