"""The bundle's bill of materials: its files with their hashes, and the packages that made them."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from trainer.base.errors import ExportError
from trainer.export.bundle import file_sha256

_ROOTS = ("kubedet", "onnx", "onnxscript", "onnxruntime", "openvino")


def write_sbom(folder: Path, target: Path, name: str, version: str) -> None:
    """Write CycloneDX 1.6 as JSON."""
    try:
        from cyclonedx.model import HashAlgorithm, HashType
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ImportError:
        raise ExportError(
            "the bill of materials needs the package cyclonedx-python-lib, which is not installed",
            fix="pip install 'kubedet[export]'",
        ) from None
    model = Component(
        name=name, version=version, type=ComponentType.MACHINE_LEARNING_MODEL, bom_ref=f"{name}@{version}"
    )
    bom = Bom()
    bom.metadata.component = model
    parts: list[Any] = [
        Component(
            name=path.name, type=ComponentType.FILE, bom_ref=f"file:{path.name}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file_sha256(path))],
        )
        for path in sorted(folder.iterdir())
    ]  # fmt: skip
    parts += [
        Component(
            name=package, version=release, type=ComponentType.LIBRARY, bom_ref=f"{package}@{release}",
            purl=PackageURL(type="pypi", name=package, version=release),
        )
        for package, release in sorted(_packages().items())
    ]  # fmt: skip
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(model, parts)
    target.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")


def _packages() -> dict[str, str]:
    """Return versions of the installed packages that an export may use, with their dependencies."""
    versions: dict[str, str] = {}
    queue = list(_ROOTS)
    for name in queue:  # It grows.
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in versions:
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # For another platform, or an extra that is not installed.
        versions[key] = installed.version
        plain = (line for line in installed.requires or [] if "extra ==" not in line)
        queue += (re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in plain)
    return versions
