"""kill -9 during a publication: `current` names a complete bundle, the old one or the new one.

At each fourth access to a file; at every one if KUBEDET_FUZZ is set.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bundles import make_bundle
from hostile import TIMES

from trainer import storage
from trainer.export import bundle, published_models

pytestmark = pytest.mark.usefixtures("forked_processes")

PUBLISH = """
import json, os, signal, sys
from trainer import storage
from trainer.export import bundle, published_models
from trainer.launching import leases

source, root, points, step = sys.argv[1], sys.argv[2], set(json.loads(sys.argv[3])), int(sys.argv[4])


def apart(function, *arguments):
    # In another process: one that has read from a store cannot be forked. Returns None if it was killed.
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        result = function(*arguments)
        os.write(sender, json.dumps(result).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return None if os.WIFSIGNALED(status) else json.loads(text)


def publish(at):
    # Kills itself at the `at`-th of these points: every access to a file passes one of them.
    passed = 0

    def count(event, arguments=None):
        nonlocal passed
        if event in points:
            passed += 1
            if passed == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    return published_models.publish(source, root, "pets").version


def checked(before):
    lock = leases.of_data_root(root)
    for name in storage.list_files(lock):  # The lease of a killed process expires in a minute: here at once.
        storage.delete(storage.join(lock, name))
    now = published_models.current(root, "pets")
    bundle.load(now.model).check()  # Complete, the old one or the new one.
    if now.version == "v2":  # Restore the state before.
        storage.write_json(f"{root}/models/pets/current", before)
        for name in storage.list_files(f"{root}/models/pets/v2"):
            storage.delete(f"{root}/models/pets/v2/{name}")
    return now.version


before = storage.read_json(f"{root}/models/pets/current")
deaths = 0
for at in range(1, 500, step):
    died = apart(publish, at) is None
    version = apart(checked, before)
    if not died:
        break
    deaths += 1
print(json.dumps({"deaths": deaths, "last": version}))
"""
FILES = ["open", "os.rename", "os.remove", "os.mkdir", "os.link", "shutil.copyfile"]


def publish_with_kills(tmp_path) -> int:
    """Check that `current` is complete after each kill; returns the number of kills."""
    root = str(tmp_path / "data_root")
    published_models.publish(make_bundle(tmp_path / "v1", version="v1"), root, "pets")
    source = make_bundle(tmp_path / "v2", version="v2")
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH, source, root, json.dumps(FILES), str(1 if TIMES > 1 else 4)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    left = [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp") or "kubedet-tmp-" in path.name]
    assert left == []
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["last"] == "v2"  # The last one was not killed.
    # Files that the killed processes left do not prevent a later publication.
    assert published_models.publish(source, root, "pets").version == "v2"
    published_models.load("pets", root).check()
    return result["deaths"]


def test_a_bundle_that_replaces_another_leaves_nothing_of_it(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    make_bundle(old)
    (old / "model.int8.onnx").write_bytes(b"of the old one")
    bundle.seal(old)
    (old / bundle.SIGNATURE).write_text("of the old one")
    make_bundle(new, version="v2")
    target = str(tmp_path / "model")
    bundle.publish(old, target)
    (tmp_path / "model" / "notes.txt").write_text("a person's own")
    bundle.publish(new, target)
    assert set(storage.list_files(target)) == {*(path.name for path in new.iterdir()), "notes.txt"}
    assert not os.path.exists(f"{target}/{bundle.SIGNATURE}")
