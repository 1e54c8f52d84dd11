"""The guide to Kubeflow: its commands work, and it names what there is."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from kfp.cli.cli import cli as kfp

from components.environment import SECRET_KEYS
from pipelines import cli, wait
from pipelines.commands import schedule
from pipelines.compile import compile_pipeline
from pipelines.parameters import SIZES, CompileOptions

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "kubeflow.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if not line.startswith("export ")]


@pytest.mark.slow
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
    assert len(kfp_server.runs) == 9  # one of them is the schedule's, by hand
    assert {item["display_name"] for item in kfp_server.schedules} == {schedule.NAME, "nightly"}
    assert all(item["mode"] == "ENABLE" and item["no_catchup"] for item in kfp_server.schedules)


def test_its_tables_are_whole(tmp_path):
    parameters = {}
    for form in (CompileOptions(volume=True, conditional=True), CompileOptions(trials=2), CompileOptions()):
        compile_pipeline(tmp_path / "p.yaml", form)
        (spec, _) = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
        parameters |= spec["root"]["inputDefinitions"]["parameters"]
    table = GUIDE[GUIDE.index("## Parameters") : GUIDE.index("## Keys of")]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    assert set(rows) == set(parameters)
    for name in ("source", "recipe", "launcher", "nodes", "nproc", "gpus", "credentials", "job", "overrides",
                 "step_cpu", "step_memory"):  # fmt: skip
        default = parameters[name]["defaultValue"]
        shown = "{}" if default == {} else f"{default:g}" if isinstance(default, float) else default
        assert rows[name].strip("`") == shown
    keys = GUIDE[GUIDE.index("## Keys of") : GUIDE.index("## Multi-user")]
    assert set(SECRET_KEYS) | set(SECRET_KEYS.values()) <= set(re.findall(r"`(\w+)`", keys))


def test_the_options_of_a_local_run_are_listed():
    text = (ROOT / "docs" / "run.md").read_text().partition("| option | meaning |")[2].partition("\n\n")[0]
    parser = cli.make_parser("run")
    (commands,) = (action for action in parser._actions if action.choices)
    options = [action.option_strings[-1] for action in commands.choices["run"]._actions]
    assert re.findall(r"^\| `(--[\w-]+)", text, re.MULTILINE) == options[1:]


def test_all_compile_options_are_documented():
    table = GUIDE[GUIDE.index("## Compile options") : GUIDE.index("## From the UI")]
    shown = re.findall(r"^\| `--(\w+)", table, re.MULTILINE)
    assert shown == [item.name for item in fields(CompileOptions)]
    assert "`--claim " in table  # What `submit` calls --volume.


def test_its_sizes_are_those_that_there_are():
    rows = re.findall(r"^  \| (\w+) \| (\w+) \| (\w+) \|", GUIDE, re.MULTILINE)
    assert {name: (cpu, memory) for name, cpu, memory in rows} == SIZES
