"""The files of some weights on this machine, and the tensors in them. No code is run from them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".safetensors", ".pth", ".pt")
"""Ends of the names of files that hold tensors, the preferred one first."""


@dataclass(frozen=True)
class WeightFiles:
    """Weights as files on this machine: one of tensors, and what was published beside it."""

    uri: str
    """What the configuration names."""
    paths: Mapping[str, Path]
    """Files by name, e.g. model.safetensors and config.json."""

    @property
    def tensors(self) -> Path:
        """The file that holds the tensors.

        Raises:
            CheckpointError: there is none, or there are several.
        """
        for suffix in SUFFIXES:
            paths = [path for name, path in self.paths.items() if name.endswith(suffix)]
            if len(paths) == 1:
                return paths[0]
        if len(self.paths) == 1:  # Whatever it is called: the reader says what is wrong with it.
            return next(iter(self.paths.values()))
        raise CheckpointError(
            f"weights {self.uri} are not one file of tensors: {', '.join(sorted(self.paths)) or 'none'}",
            fix="give the URI of a .safetensors, .pth or .pt file, or of a folder with one of them",
        )

    def state(self) -> dict[str, "Tensor"]:
        """Read the tensors, by name, onto the CPU.

        Raises:
            CheckpointError: the file is damaged, or holds more than tensors.
        """
        path = self.tensors
        try:
            return _read(path)
        except Exception as error:  # torch.load has no common error of its own
            raise CheckpointError(
                f"weights {self.uri} cannot be read: {first_line(error)}",
                fix="give a .safetensors file, or a .pt/.pth file that holds nothing but tensors",
            ) from None

    def config(self) -> dict[str, Any]:
        """Read what the publisher says of the model, its config.json; {} where there is none.

        Raises:
            CheckpointError: it is no JSON object.
        """
        if "config.json" not in self.paths:
            return {}
        try:
            config = json.loads(self.paths["config.json"].read_bytes())
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise CheckpointError(
                f"config.json of weights {self.uri} is no JSON object", fix="fetch the weights anew"
            )
        return config


def _read(path: Path) -> dict[str, "Tensor"]:
    import torch  # The steps that only look for weights start without it.
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it is not a dictionary of tensors")
    return state
