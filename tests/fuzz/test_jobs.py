"""`kubedet job render` ends with a message and a remedy, whatever a specification holds."""

import pytest
import yaml
from hostile import as_json, damaged, deep, examples, refused, spoiled, values
from hypothesis import given
from hypothesis import strategies as st

from components.launchers.render import TARGETS
from components.launchers.spec import JobSpec

SPEC = {
    "name": "a", "image": "b:1", "command": ["python", "-V"], "nodes": 2, "gpus": 1, "env": {"A": "b"},
    "mounts": [{"claim": "c", "path": "/data"}], "secret_env": [{"name": "K", "secret": "s", "key": "k"}],
    "labels": {"team": "x"}, "network": {"profile": "tcp"}, "tolerations": [{"key": "gpu"}],
    "grace_seconds": 5, "elastic": {"min_nodes": 1, "max_nodes": 3}, "cpu_limit": "4", "memory_limit": "8Gi",
    "spread": [{}], "resources": {"a.b/c": 1}, "working_dir": "/x", "ttl": None,
}  # fmt: skip
FIELDS = sorted(JobSpec.__dataclass_fields__)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{','.join(['*' + chr(97 + level)] * 9)}]\n" for level in range(8)
)


@pytest.fixture
def render(tmp_path, capsys):
    """Renders a specification of these bytes."""
    path = tmp_path / "job.yaml"

    def rendered(content: bytes, target: str = "pytorchjob", codes: tuple[int, ...] = (0, 1, 2)) -> str:
        path.write_bytes(content)
        return refused("job", "render", "--target", target, "--spec", str(path), capsys=capsys, codes=codes)

    return rendered


@pytest.mark.slow
@examples(100)
@given(spoiled(SPEC), st.sampled_from(TARGETS))
def test_specifications(render, tree, target):
    render(as_json(tree), target)


@pytest.mark.slow
@examples(50)
@given(st.one_of(damaged(yaml.safe_dump(SPEC).encode()), deep.map(str.encode), values.map(as_json)))
def test_bytes_of_specifications(render, content):
    render(content)


def test_yaml_bombs(render):
    for bomb in (BOMB.encode(), b"a: &a [*a]"):
        assert "aliases" in render(bomb, codes=(2,))
    assert "longer than" in render(b"name: a\n" + b"#" * 10_000_000, codes=(2,))


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1e999", "9" * 5000])
def test_grace_seconds_that_are_not_a_number(render, number, capsys):
    spec = f"name: a\nimage: b\ncommand: [c]\ngrace_seconds: {number}\n"
    message = render(spec.encode(), codes=(2,))
    assert "grace_seconds" in message or "YAML" in message
    words = ("--name", "a", "--image", "b", "--set", f"grace_seconds={number}", "--", "c")
    assert "grace_seconds" in refused("job", "render", *words, capsys=capsys, codes=(2,))
