"""Check an image from inside, as its last build step and user."""

import argparse
import importlib
import os
import pkgutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.markers import Marker
from packaging.requirements import Requirement

_EXTRA = {
    "components": "client",
    "operations": "client",
    "pipelines": "client",
    "operations.tuning.search": "tune",
    "trainer.export": "export",
    "trainer.steps.export": "export",
    "trainer.steps.program": "export",
    "trainer.trackers.mlflow_tracker": "mlflow",
    "trainer.trackers.wandb_tracker": "wandb",
    "trainer.model.detr": "detr",
}
"""Modules of ours that need an extra; `client` is what the distribution itself requires."""
_CLIENT = Marker('extra == ""')


def main() -> None:
    """Import all our modules, compare versions with the requirements, run one operator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help="required extras, separated by commas")
    extras = [extra for extra in parser.parse_args().extras.split(",") if extra]
    if os.getuid() == 0:
        sys.exit("error: the image's user is root")
    _check_versions(extras)
    for name in modules_for(extras):
        importlib.import_module(name)
    _check_torch()
    _check_compiler()
    subprocess.run([sys.executable, "-m", "trainer", "--help"], check=True, stdout=subprocess.DEVNULL)


def _check_versions(extras: list[str]) -> None:
    """Compare versions with the requirements; a base's torch may be too old."""
    wrong = []
    for text in requires("kubedet") or []:
        requirement = Requirement(text)
        environments = [{"extra": "" if extra == "client" else extra} for extra in extras]
        if not any((requirement.marker or _CLIENT).evaluate(each) for each in environments):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(
                f"{requirement.name} {installed} is installed, kubedet needs {requirement.specifier}"
            )
    if wrong:
        sys.exit("\n".join(f"error: {problem}" for problem in wrong))


def modules_for(extras: list[str]) -> list[str]:
    """Return the names of our modules that need no other extras."""
    absent = [name for name, extra in _EXTRA.items() if extra not in extras]
    names = []
    for package in {"trainer", "components", "operations", "pipelines"}.difference(absent):
        path = importlib.import_module(package).__path__
        modules = pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None)
        names += [package, *(module.name for module in modules)]
    left_out = tuple(f"{name}." for name in absent)
    return [name for name in sorted(names) if not f"{name}.".startswith(left_out) and "__main__" not in name]


def _check_torch() -> None:
    """Run an operator of torchvision, which fails if it was built for another torch."""
    import torch
    import torchvision

    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [0.0, 0.0, 4.0, 4.1]])
    if torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8]), 0.5).tolist() != [0]:
        sys.exit("error: torchvision's operators do not work")
    print(
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, python {sys.version.split()[0]}"
    )


def _check_compiler() -> None:
    """Compile the loss's kernel for a CPU, or warn that it is not possible."""
    import torch

    from trainer.model import fused_functions
    from trainer.model.retinanet import focal

    if missing := fused_functions.describe_missing_tool("cpu"):
        print(f"warning: {missing}: images without one train with the slower, uncompiled loss")
        return
    kernel = torch.compile(focal.focal_and_gradient_.__wrapped__, fullgraph=True)
    kernel(torch.zeros(2, 3), torch.tensor([-1, 0]), torch.ones(2))
    print("the compiler works")


if __name__ == "__main__":
    main()
