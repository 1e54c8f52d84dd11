"""Layouts for Triton and KServe."""

import json
from dataclasses import replace

import pytest

from trainer.base.errors import ConfigError, ExportError
from trainer.export import bundle
from trainer.export.server_layouts import kserve_service, write_triton


def test_a_triton_repository(bundle_uri, tmp_path):
    folder = write_triton(bundle.load(bundle_uri), str(tmp_path / "triton"), max_batch=4)
    assert folder == str(tmp_path / "triton" / "pets")
    files = {str(path.relative_to(folder)) for path in (tmp_path / "triton" / "pets").rglob("*.*")}
    assert files == {"config.pbtxt", "labels.txt", "1/model.onnx"}
    assert (tmp_path / "triton/pets/labels.txt").read_text() == "cat\ndog <b>\n"
    config = " ".join((tmp_path / "triton/pets/config.pbtxt").read_text().split())
    assert config == (
        'name: "pets" platform: "onnxruntime_onnx" max_batch_size: 4 '
        'input [ { name: "images" data_type: TYPE_UINT8 dims: [ 3, 96, 96 ] } ] '
        'output [ { name: "boxes" data_type: TYPE_FP32 dims: [ 5, 4 ] }, '
        '{ name: "scores" data_type: TYPE_FP32 dims: [ 5 ] }, '
        '{ name: "labels" data_type: TYPE_INT64 dims: [ 5 ] label_filename: "labels.txt" }, '
        '{ name: "num" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } } ] dynamic_batching { }'
    )


@pytest.mark.parametrize("kind", ["onnx-int8", "raw", "nonsense"])
def test_a_missing_format_is_refused(bundle_uri, tmp_path, kind):
    with pytest.raises(ExportError, match=f"no format {kind} that Triton serves"):
        write_triton(bundle.load(bundle_uri), str(tmp_path / "triton"), kind=kind)


def test_a_kserve_service(bundle_uri):
    metadata = replace(bundle.load(bundle_uri).metadata, name="Pets_of.2026")
    service = kserve_service(metadata, "minio://bucket/triton", "models")
    assert json.loads(json.dumps(service))["metadata"]["name"] == "pets-of-2026"
    assert service["spec"]["predictor"] == {
        "serviceAccountName": "models",
        "model": {
            "modelFormat": {"name": "triton"}, "runtime": "kserve-tritonserver", "protocolVersion": "v2",
            "storageUri": "s3://bucket/triton",
        },
    }  # fmt: skip


def test_kserve_cannot_read_a_local_folder(bundle_uri):
    with pytest.raises(ConfigError, match=r"KServe cannot read models from \./triton"):
        kserve_service(bundle.load(bundle_uri).metadata, "./triton")
