"""Faults in evaluation, export, publication and serving."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bundles import make_bundle
from fault_table import HARMS, cells, each
from hostile import TIMES
from served_model import PATIENCE, closed, opened, png, post, running, served

from tests.trainer.conftest import saved
from tests.trainer.export.test_tampered_bundle import keys, root, verify
from trainer import storage
from trainer.base.errors import DataError, KubedetError, StorageError
from trainer.data.shard_index import ShardDataset
from trainer.evaluators.shards import evaluate
from trainer.export import bundle, published_models, server
from trainer.export.export import export
from trainer.export.predict import open_bundle

__all__ = ["keys", "root", "saved"]

BOTH = ("export", "serve")


@pytest.mark.parametrize("harm", each(*HARMS, stages=("evaluate",)))
def test_damaged_evaluation_files(harm, saved, shards, config, tmp_path, chance, injected):
    """The same command finds what it found: no damaged file of its own is taken up."""
    model, folder = saved(), tmp_path / "evaluation"
    first = evaluate(model, shards, str(folder), config)
    paths = sorted(folder.iterdir())
    for path in paths:
        HARMS[harm](path, chance)
        assert evaluate(model, shards, str(folder), config) == first, path
        assert storage.read_json(str(folder / "metrics.json")) == first, path
    injected(len(paths))


@pytest.mark.parametrize("harm", each(*HARMS, stages=("evaluate",)))
def test_ground_truth(harm, shards, tmp_path, chance, injected):
    copy = Path(shutil.copytree(shards, tmp_path / "shards"))
    path = copy / "annotations/test.json"
    whole = path.read_bytes()
    for _ in range(60):
        HARMS[harm](path, chance)
        with pytest.raises(KubedetError, match=r"annotations/test\.json") as caught:
            ShardDataset(str(copy), "test").annotations()
        assert "delete" not in caught.value.fix
        path.write_bytes(whole)
    injected(60)


@cells("form", "evaluate")
@pytest.mark.parametrize("text", ["[]", "{}", "7", "{"])
def test_a_baseline_of_another_shape(text, saved, shards, config, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.json").write_text(text)
    compare = dataclasses.replace(config.evaluation, baseline=str(tmp_path / "other"))
    with pytest.raises(KubedetError, match=r"other/metrics\.json"):
        evaluate(saved(), shards, str(tmp_path / "e"), dataclasses.replace(config, evaluation=compare))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=cells(kind, "evaluate", "export")) for kind in ("swallow", "alter")]
)
def test_puts_of_an_evaluation_and_a_bundle(kind, saved, shards, config, proxy, tmp_path, injected):
    names = ["metrics.json", "gate.json", "model.onnx", "model_metadata.json", "SHA256SUMS"]
    for name in names:
        proxy.fail(kind, method="PUT", query=name)
    scored = evaluate(saved(), shards, "s3://bucket/run/evaluation", config)
    settings = dataclasses.replace(
        config, export=dataclasses.replace(config.export, formats=["onnx"], name="pets")
    )
    export(saved(), shards, "s3://bucket/run/model", settings, evaluation_uri="s3://bucket/run/evaluation")
    assert proxy.faults == []
    assert storage.read_json("s3://bucket/run/evaluation/metrics.json") == scored
    bundle.load("s3://bucket/run/model").verify_exact_files()
    proxy.fail(kind, method="PUT", query="current")
    published_models.publish("s3://bucket/run/model", "s3://bucket/root", "pets")
    published_models.load("pets", "s3://bucket/root").verify_exact_files()
    assert proxy.faults == []
    injected(len(names) + 1)


@cells("busy", "export", "serve")
@cells("reset", "export", "serve")
def test_models_on_a_failing_store(proxy, tmp_path, injected):
    for kind in ("status", "drop", "lost"):
        for method in ("GET", "PUT"):
            proxy.fail(kind, method=method, times=3)
    published_models.publish(make_bundle(tmp_path / "made"), "s3://bucket/root", "pets")
    model = open_bundle(published_models.load("pets", "s3://bucket/root"))
    assert model.metadata.name == "pets"
    injected(18)


@pytest.mark.parametrize("harm", each(*HARMS, stages=BOTH))
def test_damaged_bundle_files(harm, tmp_path, chance, injected):
    """Neither promoted nor opened; exporting and publishing it again is the way out."""
    data_root = str(tmp_path / "root")
    published_models.publish(make_bundle(tmp_path / "made"), data_root, "pets")
    folder, count = tmp_path / "root/models/pets/v1", 0
    for path in sorted(folder.iterdir()) * (5 if harm == "flip" else 1):
        whole = path.read_bytes()
        HARMS[harm](path, chance)
        with pytest.raises((KubedetError,)) as caught:
            published_models.load("pets", data_root).verify_exact_files()
        assert "Traceback" not in str(caught.value)
        with pytest.raises(KubedetError):
            published_models.promote(data_root, "pets", "v1")
        if path.name in ("model.onnx", "model_metadata.json", "SHA256SUMS"):
            with pytest.raises(KubedetError):
                open_bundle(published_models.load("pets", data_root))
        path.write_bytes(whole)
        count += 1
    published_models.load("pets", data_root).verify_exact_files()
    injected(count)


@pytest.mark.parametrize("harm", each("flip", "cut", stages=BOTH))
def test_damaged_current_files(harm, tmp_path, chance, injected):
    data_root = str(tmp_path / "root")
    published_models.publish(make_bundle(tmp_path / "made"), data_root, "pets")
    for _ in range(40):
        HARMS[harm](tmp_path / "root/models/pets/current", chance)
        with pytest.raises(KubedetError, match="current"):
            published_models.load("pets", data_root)
        published_models.promote(data_root, "pets", "v1")
        published_models.load("pets", data_root).verify_exact_files()
    injected(40)


@cells("form", *BOTH)
@pytest.mark.parametrize(
    "text", ["[]", "{}", "7", '{"kind": "current model", "version": 3}', '{"kind": "model"}']
)
def test_models_of_another_shape(text, tmp_path):
    data_root, folder = str(tmp_path / "root"), tmp_path / "made"
    published_models.publish(make_bundle(folder), data_root, "pets")
    (tmp_path / "root/models/pets/current").write_text(text)
    with pytest.raises(KubedetError, match="current"):
        published_models.load("pets", data_root)
    published_models.promote(data_root, "pets", "v1")
    (folder / bundle.METADATA).write_text(text)
    bundle.write_checksums(folder)
    with pytest.raises(KubedetError, match=r"model_metadata\.json"):
        bundle.load(str(folder))


@cells("newer", *BOTH)
def test_models_of_a_newer_program(tmp_path):
    data_root, folder = str(tmp_path / "root"), tmp_path / "made"
    published_models.publish(make_bundle(folder), data_root, "pets")
    current = str(tmp_path / "root/models/pets/current")
    storage.write_json(current, storage.read_json(current) | {"form": 9})
    metadata = json.loads((folder / bundle.METADATA).read_text())
    (folder / bundle.METADATA).write_text(json.dumps(metadata | {"version": 9}))
    bundle.write_checksums(folder)
    for use in (
        lambda: published_models.load("pets", data_root),
        lambda: published_models.promote(data_root, "pets", "v1"),
        lambda: bundle.load(str(folder)),
    ):
        with pytest.raises(DataError, match="was written by another version of kubedet"):
            use()


PUBLISH = """
import os, signal, sys
from trainer.export import published_models

FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "shutil.copyfile"}
left = int(sys.argv[3])


def count(event, arguments):
    global left
    left -= event in FILES
    if left == 0 and event in FILES:
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(count)
published_models.publish(sys.argv[1], sys.argv[2], "pets")
"""


@cells("kill", "export")
def test_kills_of_a_publication(tmp_path, injected):
    """At each fourth access to a file, at every one if KUBEDET_FUZZ is set: `current` is complete."""
    root, source = str(tmp_path / "root"), make_bundle(tmp_path / "v2", version="v2")
    published_models.publish(make_bundle(tmp_path / "v1", version="v1"), root, "pets")
    before = storage.read_json(f"{root}/models/pets/current")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    kills = 0
    for at in range(1, 1000, 1 if TIMES > 1 else 4):
        command = [sys.executable, "-c", PUBLISH, source, root, str(at)]
        code = subprocess.run(command, env=environment, check=False).returncode
        now = published_models.read_current(root, "pets")
        bundle.load(now.model).verify_checksums()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        if now.version == "v2":
            storage.write_json(f"{root}/models/pets/current", before)
            shutil.rmtree(f"{root}/models/pets/v2")
    assert now.version == "v2" and kills > 8
    left = [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp") or "kubedet-tmp-" in path.name]
    assert left == []
    # Files that the killed processes left do not prevent a later publication.
    assert published_models.publish(source, root, "pets").version == "v2"
    published_models.load("pets", root).verify_checksums()
    injected(kills)


@cells("swap", *BOTH)
def test_another_model_in_a_versions_folder(root, keys, injected):
    models = root / "models" / "pets"
    shutil.rmtree(models / "v2")
    shutil.copytree(models / "v1", models / "v2")
    for name in ("pets", "pets@v2"):
        with pytest.raises(StorageError, match="contains pets v1, not pets v2"):
            verify(name, root, keys[1])
    shutil.copytree(models, root / "models" / "people")
    with pytest.raises(StorageError, match="contains pets v1, not people v1"):
        verify("people@v1", root, keys[1])
    injected(3)


@cells("added", *BOTH)
@pytest.mark.parametrize("name", ["libonnx.so", ".pth", "sub/code.py"])
def test_added_files_of_a_bundle_are_refused(root, keys, name):
    path = root / "models/pets/v2" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"code")
    with pytest.raises(StorageError, match=path.name):
        verify("pets", root, keys[1])


@cells("moved", "evaluate", *BOTH)
def test_moved_models(saved, shards, config, bucket, tmp_path):
    evaluate(saved(), shards, str(tmp_path / "first"), config)
    published_models.publish(make_bundle(tmp_path / "made"), str(tmp_path / "root"), "pets")
    shutil.move(tmp_path / "root", bucket / "root")
    shutil.move(tmp_path / "first", tmp_path / "moved")
    model = open_bundle(published_models.load("pets", "s3://bucket/root"))
    assert model.metadata.model_version == "v1"
    compare = dataclasses.replace(config.evaluation, baseline=str(tmp_path / "moved"), bootstrap=5)
    again = evaluate(saved(), shards, str(tmp_path / "e"), dataclasses.replace(config, evaluation=compare))
    assert again["comparison"]["changes"]["coco/AP"][2:4] == [0, 0]


def peak_memory(process) -> int:
    with open(f"/proc/{process.pid}/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmHWM"))


@cells("bomb", "serve")
def test_huge_images_are_refused_undecoded(tmp_path, injected):
    made = make_bundle(tmp_path / "made")
    command = ["-m", "kubedet.cli", "serve", made, "--port", "0"]
    with running(command, tmp_path) as (process, port):
        address = ("127.0.0.1", port)
        assert post(address, png(500))[0] == 200
        before, many = peak_memory(process), png(13_000)
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda _: post(address, many), range(6)))
        assert {status for status, _ in answers} == {413}
        assert peak_memory(process) - before < 60
    injected(6)


@cells("silent", "serve")
def test_silent_connections(tmp_path, monkeypatch, injected):
    monkeypatch.setattr(server._Handler, "timeout", 0.5)
    with served(make_bundle(tmp_path / "made")) as (port, _):
        address = ("127.0.0.1", port)
        clients = [opened(address, b"GET / HTTP/1.1\r\n" if number % 2 else b"") for number in range(100)]
        assert post(address, png(100))[0] == 200
        assert [closed(client) for client in clients] == [b""] * 100
    injected(100)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGTERM, marks=cells("stop", "serve")),
        pytest.param(signal.SIGKILL, marks=cells("kill", "serve")),
    ],
)
def test_a_stopped_server_starts_again(end, tmp_path):
    made = make_bundle(tmp_path / "made")
    with running(["-m", "kubedet.cli", "serve", made, "--port", "0"], tmp_path) as (process, port):
        assert post(("127.0.0.1", port), png(100))[0] == 200
        process.send_signal(end)
        assert process.wait(PATIENCE) == (0 if end == signal.SIGTERM else -end)
    with running(["-m", "kubedet.cli", "serve", made, "--port", str(port)], tmp_path) as (_, again):
        assert again == port and post(("127.0.0.1", port), png(100))[0] == 200


@cells("other", "serve")
def test_requests_that_are_not_images(tmp_path, injected):
    bodies = [b"", b"<html>", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n" + b"x" * 50, os.urandom(5000)]
    with served(make_bundle(tmp_path / "made")) as (port, _):
        for body in bodies:
            status, answer = post(("127.0.0.1", port), body)
            assert status == 400 and answer["error"]
        assert post(("127.0.0.1", port), png(100))[0] == 200
    injected(len(bodies))
