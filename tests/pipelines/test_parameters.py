"""The one table of the pipeline's parameters: whatever is shown of one follows from it."""

from dataclasses import fields, replace
from itertools import product

import pytest
import yaml

from components.jobs import PARAMETERS
from components.launchers.spec import JobSpec, from_fields
from pipelines import cli, parameters
from pipelines.compile import compile_pipeline
from pipelines.forms import Form
from pipelines.parameters import LOCAL, REQUIRED, TABLE

OTHERWISE = {"overrides": "--set KEY=VALUE", "job": "--job FIELD=VALUE"}
TYPES = {str: "STRING", int: "NUMBER_INTEGER", dict: "STRUCT"}


def compiled(folder, form):
    compile_pipeline(folder / "p.yaml", form)
    (spec, _) = yaml.safe_load_all((folder / "p.yaml").read_text())
    return spec["root"]["inputDefinitions"]["parameters"]


@pytest.fixture
def helped(capsys, monkeypatch):
    """What a command's help says, an option a line."""
    monkeypatch.setenv("COLUMNS", "1000")

    def help_of(command):
        with pytest.raises(SystemExit):
            cli.main([*command.split(), "--help"])
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return help_of


@pytest.mark.parametrize(
    "form",
    [Form(volume=volume, until=until) for volume, until in product((False, True), ("", "shards"))],
    ids=str,
)
def test_the_compiled_file_has_what_the_table_says(tmp_path, form):
    declared = compiled(tmp_path, form)
    of_form = {item.name: item for item in parameters.of(form)}
    assert set(declared) == set(of_form)
    for name, item in of_form.items():
        definition = {"parameterType": TYPES[item.kind], "description": item.description}
        definition |= {"literals": list(item.choices)} if item.choices else {}
        definition |= {} if item.default is REQUIRED else {"defaultValue": item.default, "isOptional": True}
        assert declared[name] == definition, name


def test_what_is_changed_in_the_table_is_changed_everywhere(tmp_path, helped, monkeypatch):
    """Whoever tells a parameter a second time does not know this."""
    gate = replace(
        TABLE["gate"], meaning="how strict it is", default="lax", default_told="", choices=("lax",)
    )
    monkeypatch.setitem(TABLE, "gate", gate)
    monkeypatch.setitem(LOCAL, "gate", gate)
    assert compiled(tmp_path, Form())["gate"] == {
        "parameterType": "STRING", "description": "how strict it is.", "literals": ["lax"],
        "defaultValue": "lax", "isOptional": True,
    }  # fmt: skip
    for command in ("submit", "schedule create", "run"):
        assert "--gate RULE how strict it is (default: lax)" in helped(command)


@pytest.mark.parametrize("command", ["submit", "schedule create"])
def test_each_parameter_is_an_option_of_what_sends_a_run(helped, command):
    shown = helped(command)
    for name, item in TABLE.items():
        if item.only == "trials":  # `kubedet tune` makes these of its own options.
            assert not any(line.startswith(item.option) for line in shown)
        elif not item.metavar:
            assert any(line.startswith(OTHERWISE[name]) for line in shown)
        elif (name, command) != ("data_version", "schedule create"):  # A schedule gives each run its time.
            assert f"{item.option} {item.metavar} {item.help()}" in shown


def test_each_parameter_of_a_local_run_is_an_option_of_it(helped):
    shown = helped("run")
    assert set(LOCAL) == {name for name, item in TABLE.items() if item.local}
    for name, item in LOCAL.items():
        assert name == "overrides" or f"{item.option} {item.metavar} {item.help()}" in shown


def test_a_volume_makes_its_claim_required_and_is_the_default_place():
    assert next(parameters.of(Form(volume=True))) == TABLE["claim"]
    assert TABLE["claim"].default is REQUIRED
    assert parameters.default("data_root") == ""
    assert parameters.default("data_root", Form(volume=True)) == "/data/kubedet"


def test_what_is_a_field_of_every_job_is_told_by_the_job():
    assert set(PARAMETERS) <= {field.name for field in fields(JobSpec)} & set(TABLE)
    job = from_fields({"command": ["x"], "image": "i"})
    for name in ("nodes", "nproc", "gpus"):
        assert TABLE[name].default == getattr(job, name) and TABLE[name].kind is int
    assert TABLE["nproc"].meaning == "processes on each node; 0 is one for each GPU, or one"
