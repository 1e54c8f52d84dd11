"""The guide to Kubeflow: its commands work, and it names what there is."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from kfp.cli.cli import cli as kfp

from components.stores import SECRET_KEYS
from pipelines import cli, wait
from pipelines.commands import schedule
from pipelines.compile import compile_pipeline

GUIDE = (Path(__file__).parents[2] / "docs" / "kubeflow.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if not line.startswith("export ")]


@pytest.mark.filterwarnings("ignore:This client only works")
def test_its_commands_work(kfp_server, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wait, "SECONDS", 0.0)
    ran = {"kubedet": 0, "kfp": 0}
    for command in COMMANDS:
        tool, *words = shlex.split(command)
        if tool == "kubedet":
            assert cli.main(words) == 0, command
        else:
            # As its console script calls it; a mistake is an exception.
            kfp.main(words, obj={}, auto_envvar_prefix="KFP", standalone_mode=False)
        ran[tool] += 1
    assert ran["kubedet"] >= 8 and ran["kfp"] >= 5
    assert len(kfp_server.runs) == 7
    assert {item["display_name"] for item in kfp_server.schedules} == {schedule.NAME, "nightly"}
    assert all(item["mode"] == "ENABLE" and item["no_catchup"] for item in kfp_server.schedules)


def test_its_tables_are_whole(tmp_path):
    parameters = {}
    for volume in (True, False):
        compile_pipeline(tmp_path / "p.yaml", volume=volume)
        (spec, _) = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
        parameters |= spec["root"]["inputDefinitions"]["parameters"]
    table = GUIDE[GUIDE.index("## Parameters") : GUIDE.index("## Keys of")]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    assert set(rows) == set(parameters)
    for name in ("source", "recipe", "launcher", "nodes", "nproc", "gpus", "credentials", "job", "overrides"):
        default = parameters[name]["defaultValue"]
        shown = "{}" if default == {} else f"{default:g}" if isinstance(default, float) else default
        assert rows[name].strip("`") == shown
    keys = GUIDE[GUIDE.index("## Keys of") : GUIDE.index("## A Kubeflow for")]
    assert set(SECRET_KEYS) | set(SECRET_KEYS.values()) <= set(re.findall(r"`(\w+)`", keys))
