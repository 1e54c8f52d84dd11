"""What `kubedet run` needs of this machine."""

from collections.abc import Iterator
from importlib.util import find_spec

from trainer.doctor import Check, Needs, examine

_PACKAGES = {
    "": ("torch", "torchvision", "pycocotools", "simplejpeg"),
    "pipeline": ("kfp",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}
"""What is imported, by the extra of kubedet that installs it."""


def check(needs: Needs) -> Iterator[Check]:
    """Check this machine. What is not there is told only if it is asked for: one machine needs little.

    Args:
        needs: what must be there.

    Yields:
        One check for each thing; the installed packages alone where PyTorch is missing.
    """
    packages = _packages()
    yield packages
    if packages.state == "ok" or find_spec("torch"):
        yield from (found for found in examine(needs) if found.state != "warning" or needs.gpus > 1)


def _packages() -> Check:
    absent = {extra: [name for name in names if not find_spec(name)] for extra, names in _PACKAGES.items()}
    extras = [extra for extra, names in absent.items() if names and extra]
    names = [name for group in absent.values() for name in group]
    if not names:
        return Check("packages", "ok", "all that a run imports is installed")
    wanted = f"kubedet[{','.join(extras)}]" if extras else "kubedet"
    return Check("packages", "missing", f"not installed: {', '.join(names)}", f"pip install '{wanted}'")
