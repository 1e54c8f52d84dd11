"""A job from a file, FIELD=VALUE texts and single fields, and every problem of them at once."""

import io
import json

import pytest

from components.launchers.job_options import read_job
from trainer.base.errors import ConfigError

GIVEN = {"name": "it", "image": "i:1", "command": ["true"]}


def refused(**given):
    with pytest.raises(ConfigError) as raised:
        read_job(**given)
    return str(raised.value)


@pytest.fixture
def write(tmp_path):
    def write(text, name="job.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_arguments_are_fields():
    mounts = ["data:/data", "models:/models"]
    spec = read_job(["true"], name="big", image="i:1", nodes=2, nproc=4, gpus=8, env=["A=b=c"], mount=mounts)
    assert (spec.name, spec.image, spec.nodes, spec.nproc, spec.gpus) == ("big", "i:1", 2, 4, 8)
    assert spec.env == {"A": "b=c"}
    assert [(mount.claim, mount.path) for mount in spec.mounts] == [("data", "/data"), ("models", "/models")]


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("cpu_limit=4", "cpu_limit", "4"),
        ("env.WORKERS=1", "env", {"WORKERS": "1"}),
        ("node_selector.kubernetes.io/arch=arm64", "node_selector", {"kubernetes.io/arch": "arm64"}),
        ("image_pull_secrets=[a, b]", "image_pull_secrets", ("a", "b")),
        ("image_pull_secrets.0=a", "image_pull_secrets", ("a",)),
        ("ttl=null", "ttl", None),
        ('env={"A": "b"}', "env", {"A": "b"}),
    ],
)  # fmt: skip
def test_set_reads_a_value_as_its_field_asks(text, field, value):
    assert getattr(read_job(**GIVEN, fields=[text]), field) == value


def test_set_reaches_nested_fields_and_items_of_lists():
    spec = read_job(
        **GIVEN,
        fields=[
            "network.profile=rdma",
            "network.gid_index=3",
            "elastic.max_nodes=4",
            "tolerations.0.key=gpu",
            "tolerations.1.key=spot",
        ],
    )
    assert (spec.network.profile, spec.network.gid_index) == ("rdma", 3)
    assert spec.elastic.max_nodes == 4
    assert [item.key for item in spec.tolerations] == ["gpu", "spot"]


def test_arguments_replace_fields_of_a_file(write):
    file = write("""
name: from-file
nodes: 4
command: [python, train.py]
env: {A: file, B: file}
mounts:
- {claim: data, path: /data}
""")
    spec = read_job(spec=file, image="i:1", nodes=2, fields=["env.A=set", "mounts.0.read_only=true"])
    assert (spec.name, spec.nodes, spec.command) == ("from-file", 2, ("python", "train.py"))
    assert spec.env == {"A": "set", "B": "file"}
    assert spec.mounts[0].read_only


def test_json_and_stdin_are_read(write, monkeypatch):
    text = json.dumps({"name": "j", "image": "i", "command": ["x"], "labels": {"day": "2026-11-21"}})
    assert read_job(spec=write(text, "job.json")).name == "j"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert read_job(spec="-").name == "j"


def test_all_problems_are_in_one_error(write):
    message = refused(
        spec=write("nodes: 0\ncolor: red\ngpus: many\nelastic: {min_nodes: 3, max_nodes: 2}"),
        name="Not_A_Name",
        mount=["data"],
        env=["A"],
        fields=["nodes", "name.first=x", "mounts.0.claim=data", "mounts.7.claim=x"],
    )
    for line in [
        "nodes: input should be greater than or equal to 1, not 0",
        "color: no such field",
        "elastic: min_nodes 3 is above max_nodes 2",
        "name: 'Not_A_Name' is not a DNS-1035 label",
        'gpus: input should be a valid integer, not "many"',
        "'env.A' is not FIELD=VALUE",
        "'nodes' is not FIELD=VALUE",
        "name.first: name has no fields",
        "mounts.0.path: is missing",
        "mounts.7.claim: '7' is not a number from 0 to 1",
        "command: is missing",
        "image: is missing",
    ]:
        assert f"\n  {line}" in message
    assert "\n  fix: " in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "contains no job fields"),
        ("", "contains no job fields"),
        ("env: {A: 1", "as YAML"),
        ("nodes: 1\nnodes: 2", "'nodes' occurs twice"),
        ("!!python/object/apply:os.getcwd []", "as YAML"),
    ],
)
def test_a_file_that_is_no_specification_is_refused(write, text, message):
    file = write(text)
    error = refused(spec=file)
    assert message in error
    assert file in error
    assert "fix: " in error
