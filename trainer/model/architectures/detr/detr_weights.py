"""Weights in transformers' layout: what `save_pretrained` writes, and what its hub has.

On a disk some tensors have other names than in memory: transformers itself translates.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import safetensors.torch
from torch import Tensor, nn
from transformers.utils import logging as library_logging

from trainer.errors import CheckpointError
from trainer.model.architecture import UpstreamWeights
from trainer.temporary_folders import temporary_folder

_CLASSES = ("enc_score_head.", "decoder.class_embed.", "denoising_class_embed.")
"""Beginnings of the names of the tensors that know of the classes, in the inner model."""
_INNER, _BACKBONE = "model.", "model.backbone.model."
_WEIGHTS = "model.safetensors"
_CLASSIFIER = ("fc.", "head.", "last_conv.")
_RENAMED = (
    (re.compile(r"^stem\."), "embedder."),
    (re.compile(r"^stages\."), "encoder.stages."),
    (re.compile(r"\.conv\."), ".convolution."),
    (re.compile(r"\.bn\."), ".normalization."),
)
"""PPHGNetV2 by its authors, by D-FINE's and by timm -> by transformers."""
_COUNTER = "num_batches_tracked"
"""Of a BatchNorm; a frozen one has none, and nothing depends on it."""
_SHOWN = 5


def load(
    model: nn.Module, upstream: Any, config: Any, state: dict[str, Tensor], source: str, title: str
) -> str:
    """Load a detector's or a backbone's weights into transformers' inner model, in place.

    Heads of other classes are left as they are, to be trained anew; any other tensor must fit.

    Args:
        model: the inner model.
        upstream: transformers' class of the whole one.
        config: its configuration.
        state: tensors as in a file.
        source: where they come from, for errors.
        title: what the detector is called.

    Returns:
        What was loaded, for the log.

    Raises:
        CheckpointError: they are of another architecture or size.
    """
    backbone = not any(name.startswith(_INNER) for name in state)
    if backbone:
        # Of a classifier: its backbone's names have no prefix, its last layers are of no use.
        state = {
            _BACKBONE + _library_name(name): value
            for name, value in state.items()
            if not name.startswith(_CLASSIFIER)
        }
    with _quiet():
        whole, report = upstream.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True
        )
    inner: dict[str, Tensor] = whole.model.state_dict()
    replaced = {name.removeprefix(_INNER) for name, *_ in report["mismatched_keys"]}
    missing = {name.removeprefix(_INNER) for name in report["missing_keys"]}
    if backbone:
        missing = {name for name in missing if (_INNER + name).startswith(_BACKBONE)}
    missing = {name for name in missing if not name.endswith(_COUNTER)}
    wrong = {name for name in replaced if not name.startswith(_CLASSES)}
    foreign = {name for name in report["unexpected_keys"] if not name.endswith(_COUNTER)}
    if wrong or missing or foreign:
        raise CheckpointError(
            f"weights {source} are not those of {title}:\n  " + _first(wrong, missing, foreign, report),
            fix="set model.architecture, model.size and model.width as in the weights, or take others",
        )
    left = replaced | missing | {name for name in inner if backbone and not name.startswith("backbone.")}
    taken = {name: value for name, value in inner.items() if name not in left}
    model.load_state_dict(taken, strict=False)
    if backbone:
        return f"loaded {len(taken)} tensors from {source}; all but the backbone is new"
    return f"loaded {len(taken)} tensors from {source}" + (
        "; the classification layers are new" if replaced else ""
    )


def folder(model: nn.Module, upstream: Any, config: Any, names: Sequence[str]) -> UpstreamWeights:
    """Return the weights and the configuration that `from_pretrained` takes.

    Args:
        model: the inner model.
        upstream: transformers' class of the whole one.
        config: its configuration.
        names: of the classes.
    """
    whole = upstream(config)
    whole.model.load_state_dict(model.state_dict())
    whole.config.id2label = dict(enumerate(names))
    whole.config.label2id = {name: label for label, name in enumerate(names)}
    with temporary_folder() as temporary, _quiet():
        whole.save_pretrained(temporary)
        state = safetensors.torch.load_file(temporary / _WEIGHTS)
        files = {"config.json": (temporary / "config.json").read_bytes()}
    return UpstreamWeights(state, len(names), files)


def _library_name(name: str) -> str:
    """Name of a backbone's tensor in transformers."""
    if name.startswith(("stem.", "stages.")):
        for pattern, replacement in _RENAMED:
            name = pattern.sub(replacement, name)
    return name


def _first(wrong: set[str], missing: set[str], foreign: set[str], report: dict[str, Any]) -> str:
    """The first few differences, a line each."""
    shapes = {name: sizes for name, *sizes in report["mismatched_keys"]}
    lines = [
        f"{name}: {_shape(given)} in the file, {_shape(expected)} in the model"
        for name in sorted(wrong)
        for given, expected in (shapes[_INNER + name],)
    ]
    lines += [f"{name}: missing" for name in sorted(missing)]
    lines += [f"{name}: not in the model" for name in sorted(foreign)]
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "\n  ".join(lines[:_SHOWN]) + more


def _shape(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides)) or "scalar"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and reports off the terminal: ours says what matters."""
    level = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        library_logging.enable_progress_bar()
