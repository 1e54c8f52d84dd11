"""Altered bundles: `kubedet model verify` refuses all that OpenSSF's verifier refuses, and more."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundles import make_bundle
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import ExportError, FormatError, KubedetError, StorageError
from trainer.export import bundle, published_models
from trainer.export.predict import open_bundle

pytest.importorskip("model_signing")


def write_keys(folder: Path) -> tuple[str, str]:
    """Write a private and a public key; returns their paths."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "private.pem", folder / "public.pem"
    pem = serialization.Encoding.PEM
    private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, form))
    return str(private), str(public)


@pytest.fixture
def keys(tmp_path) -> tuple[str, str]:
    return write_keys(tmp_path / "keys")


@pytest.fixture
def root(tmp_path, keys) -> Path:
    """A data root with two signed versions, the second one current."""
    for version in ("v1", "v2"):
        created = f"2026-11-2{version[1]}T08:00:00+00:00"
        made = make_bundle(
            tmp_path / "made" / version, version=version, ap=0.1 * int(version[1]), created=created
        )
        bundle.sign(Path(made), keys[0])
        published_models.publish(made, str(tmp_path / "root"), "pets")
    return tmp_path / "root"


def openssf_accepts(folder: Path, public: str) -> bool:
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder), "--public_key", public]
    command += ["--signature", str(folder / bundle.SIGNATURE), "--no-ignore-git-paths"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def verify(model: str, root: Path, public: str) -> None:
    """Do what `kubedet model verify MODEL --public-key FILE` does."""
    chosen = published_models.load(model, str(root))
    chosen.verify_exact_files()
    bundle.check_signature(chosen, public)


ALTERED = {
    "resealed": "echo other > model.onnx; sha256sum $(ls | grep -v -e SHA256SUMS -e model.sig) > SHA256SUMS",
    "without": "rm -f MODEL_CARD.md",
    "added": "echo code > libonnx.so",
    "added below": "mkdir -p .git/hooks && echo code > .git/hooks/post",
    "linked": "mv model.onnx .. && ln -s ../model.onnx model.onnx",
    "linked folder": "ln -s .. more",
    "other checksums": "tac SHA256SUMS > ../reversed && mv ../reversed SHA256SUMS",
    "fifo": "rm -f {0} && mkfifo {0}",
    "device": "ln -sf /dev/zero {0}",
    "sparse": "truncate -s 8T {0}",
}
"""Commands in a bundle's folder, some of them with the name of a file."""


def alter(folder: Path, how: str, name: str = "") -> None:
    subprocess.run(["sh", "-c", ALTERED[how].format(name)], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(("fifo", name) for name in ("more", bundle.SIGNATURE, bundle.METADATA, bundle.CHECKSUMS)),
        ("device", "model.onnx"),
        ("sparse", bundle.METADATA),
        ("sparse", "model.onnx"),
    ],
)
def test_irregular_and_huge_files_are_refused(root, keys, how, name):
    alter(root / "models" / "pets" / "v2", how, name)
    with pytest.raises(StorageError) as caught:
        verify("pets@v2", root, keys[1])
    assert caught.value.fix


def test_prediction_opens_regular_files_only(root):
    alter(root / "models" / "pets" / "v2", "fifo", "model.onnx")
    chosen = published_models.load("pets", str(root))
    with pytest.raises(StorageError, match=r"model\.onnx"):
        open_bundle(chosen)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("input", "resize"), ["squash"]), (("input", "fill"), 300),
        (("input", "input_size"), 0), (("input", "input_size"), 1_000_000), (("classes",), []),
        (("formats", "onnx", "files"), []), (("formats", "onnx", "files"), ["/dev/zero"]),
        (("classes", 1, "id"), 0), (("created",), "2026-13-01"), (("created",), "2026-11-23T10:00:00"),
    ],
)  # fmt: skip
def test_values_that_no_export_writes_are_refused(tmp_path, keys, value):
    folder = Path(make_bundle(tmp_path / "made"))
    metadata = json.loads((folder / bundle.METADATA).read_text())
    *above, last = keys
    functools.reduce(lambda part, key: part[key], above, metadata)[last] = value
    (folder / bundle.METADATA).write_bytes(json_files.encode(metadata))
    bundle.write_checksums(folder)
    with pytest.raises(FormatError) as caught:
        bundle.load(str(folder))
    assert bundle.METADATA in caught.value.message and caught.value.fix


def test_both_verifiers_accept_an_unchanged_bundle(root, keys):
    assert openssf_accepts(root / "models" / "pets" / "v2", keys[1])
    for model in ("pets", "pets@v1", str(root / "models" / "pets" / "v2")):
        verify(model, root, keys[1])


def test_another_key_and_no_signature_are_refused(root, keys, tmp_path):
    with pytest.raises(ExportError, match="does not match"):
        bundle.check_signature(published_models.load("pets", str(root)), write_keys(tmp_path / "other")[1])
    (root / "models" / "pets" / "v2" / bundle.SIGNATURE).unlink()
    with pytest.raises(ExportError, match="is not signed"):
        verify("pets", root, keys[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["resealed", "without", "added below", "linked", "other checksums"])
def test_changes_that_the_openssf_verifier_refuses_are_refused(root, keys, how):
    folder = root / "models" / "pets" / "v2"
    alter(folder, how)
    assert not openssf_accepts(folder, keys[1])
    for model in ("pets", "pets@v2", str(folder)):
        with pytest.raises(KubedetError) as caught:
            verify(model, root, keys[1])
        assert caught.value.fix
    with pytest.raises(KubedetError):  # nor by the signature alone
        bundle.check_signature(bundle.load(str(folder)), keys[1])


@pytest.mark.parametrize("how", ["added", "added below", "linked", "linked folder", "without"])
def test_added_and_missing_files_are_refused_without_a_key(root, how):
    alter(root / "models" / "pets" / "v2", how)
    with pytest.raises(StorageError, match="v2"):
        published_models.load("pets@v2", str(root)).verify_exact_files()


def test_an_old_bundle_under_a_newer_versions_name_is_refused(root, keys):
    models = root / "models" / "pets"
    shutil.rmtree(models / "v2")
    shutil.copytree(models / "v1", models / "v2")
    assert openssf_accepts(models / "v2", keys[1])  # The signature does not cover the folder's name.
    for model in ("pets", "pets@v2", str(models / "v2"), f"{models}/v2/"):
        with pytest.raises(StorageError, match="contains pets v1, not pets v2"):
            verify(model, root, keys[1])
    with pytest.raises(StorageError, match="contains pets v1"):
        published_models.promote(str(root), "pets", "v2")
    assert list(published_models.load_versions(str(root), "pets")[1]) == ["v2"]


def test_at_least_refuses_an_older_signed_version_in_current(root, keys, kubedet):
    command = ["model", "verify", "pets", "--data-root", str(root), "--public-key", keys[1]]
    assert kubedet(*command, "--at-least", "v1")[0] == kubedet(*command, "--at-least", "v2")[0] == 0
    current = root / "models" / "pets" / "current"
    record = json.loads(current.read_text()) | {"version": "v1"}
    record["digest"] = bundle.load(str(root / "models" / "pets" / "v1")).digest
    current.write_bytes(json_files.encode(record))
    assert kubedet(*command)[0] == 0, "every file of v1 is signed"
    code, _, err = kubedet(*command, "--at-least", "v2")
    assert code == 2 and "older than version v2" in err
    assert "no version v3" in kubedet(*command, "--at-least", "v3")[2]
    # An earlier time of the named version is no way around it.
    metadata = root / "models" / "pets" / "v2" / bundle.METADATA
    metadata.write_text(metadata.read_text().replace("2026-11-22", "2026-11-20"))
    bundle.write_checksums(metadata.parent)
    code, _, err = kubedet(*command, "--at-least", "v2")
    assert code != 0 and "does not match" in err


def test_current_names_its_bundle_by_digest(root, tmp_path):
    record = published_models.read_current(str(root), "pets")
    assert record is not None and record.digest == bundle.load(str(root / "models/pets/v2")).digest
    # Another complete model under the same name and version.
    shutil.rmtree(root / "models" / "pets" / "v2")
    bundle.copy(bundle.load(make_bundle(tmp_path / "x", version="v2", ap=0.9)), str(root / "models/pets/v2"))
    with pytest.raises(StorageError, match="has changed since it became the current") as caught:
        published_models.load("pets", str(root))
    assert "promote" in caught.value.fix
    published_models.promote(str(root), "pets", "v2")
    published_models.load("pets", str(root))


def test_signatures_in_a_bucket(keys, bucket, tmp_path):
    made = make_bundle(tmp_path / "made")
    bundle.sign(Path(made), keys[0])
    published_models.publish(made, "s3://bucket/root", "pets")
    published_models.load("pets", "s3://bucket/root").verify_exact_files()
    bundle.check_signature(published_models.load("pets", "s3://bucket/root"), keys[1])
    storage.write_bytes("s3://bucket/root/models/pets/v1/sub/code.py", b"1")
    with pytest.raises(StorageError, match=r"sub/code\.py: added"):
        bundle.check_signature(published_models.load("pets", "s3://bucket/root"), keys[1])
