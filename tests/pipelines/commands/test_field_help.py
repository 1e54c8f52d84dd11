"""`recipes --explain` and `job fields` explain every key and field."""

import re
from dataclasses import asdict

from components.launchers.spec import JobSpec
from trainer.model import recipes


def leaves(tree, prefix=""):
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]


def test_every_key_of_a_recipe_has_a_meaning(kubedet):
    code, out, _ = kubedet("recipes", "--show", "debug", "--explain")
    assert code == 0
    paragraphs = re.findall(r"^(\S+) = .*\n((?:    .+\n)+)", out, re.MULTILINE)
    assert [name for name, _ in paragraphs] == list(leaves(asdict(recipes.load("debug"))))


def test_every_field_of_a_job_has_a_meaning(kubedet):
    code, out, _ = kubedet("job", "fields")
    assert code == 0
    paragraphs = re.findall(r"^(\S+) = (.*)\n    (\S.*)", out, re.MULTILINE)
    names = {name: value for name, value, _ in paragraphs}
    assert len(names) == len(re.findall(r"^\S", out, re.MULTILINE))
    tops = {name.partition(".")[0] for name in names}
    assert tops == set(JobSpec.__pydantic_fields__)
    expected = {"command": "(required)", "nodes": "1", "shared_memory": "8Gi", "run_as_non_root": "true",
                "mounts.*.path": "(required)", "elastic.min_nodes": "1", "network.profile": "default",
                "ttl": "86400", "run_as_user": "null", "env": "{}", "capabilities": "[]"}  # fmt: skip
    assert expected.items() <= names.items()
    out = kubedet("job", "fields", "SHARED_mem")[1]
    assert "shared_memory = 8Gi" in out and "nodes = " not in out
    assert "no field contains 'zebra'" in kubedet("job", "fields", "zebra")[2]
