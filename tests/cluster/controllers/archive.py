"""Write an OCI archive of an image that holds one static program, for `ctr images import` and its like."""

import argparse
import gzip
import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MEDIA = "application/vnd.oci.image"


def member(archive: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    """Add a file to an archive, without time and owner: the same program gives the same image."""
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def layer(program: bytes) -> tuple[bytes, str]:
    """The image's only layer, compressed: /manager and a /tmp that everybody may write.

    Returns the layer and the digest of what it is uncompressed.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(folder)
        member(archive, "manager", program, 0o755)
    content = buffer.getvalue()
    return gzip.compress(content, compresslevel=1, mtime=0), f"sha256:{hashlib.sha256(content).hexdigest()}"


def write(program: Path, name: str, output: Path) -> None:
    """Write the archive `output` of the image `name`, which runs `program` as a user without rights."""
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    packed, unpacked_digest = layer(program.read_bytes())
    with tarfile.open(output, "w") as archive:

        def blob(content: bytes, kind: str, **more: Any) -> dict[str, Any]:
            digest = hashlib.sha256(content).hexdigest()
            member(archive, f"blobs/sha256/{digest}", content)
            return {
                "mediaType": f"{MEDIA}.{kind}",
                "digest": f"sha256:{digest}",
                "size": len(content),
                **more,
            }

        def document(kind: str, value: dict[str, Any], **more: Any) -> dict[str, Any]:
            return blob(json.dumps(value).encode(), kind, **more)

        config = document(
            "config.v1+json",
            {
                "architecture": architecture,
                "os": "linux",
                "config": {"Entrypoint": ["/manager"], "User": "65532:65532", "WorkingDir": "/"},
                "rootfs": {"type": "layers", "diff_ids": [unpacked_digest]},
            },
        )
        layers = [blob(packed, "layer.v1.tar+gzip")]
        manifest = document(
            "manifest.v1+json",
            {
                "schemaVersion": 2,
                "mediaType": f"{MEDIA}.manifest.v1+json",
                "config": config,
                "layers": layers,
            },
            platform={"architecture": architecture, "os": "linux"},
            annotations={
                "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": name.rpartition(":")[2],
            },
        )
        index = {"schemaVersion": 2, "mediaType": f"{MEDIA}.index.v1+json", "manifests": [manifest]}
        member(archive, "index.json", json.dumps(index).encode())
        member(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("name")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    write(options.program, options.name, options.output)
