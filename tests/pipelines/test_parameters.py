"""The table of the pipeline's parameters: the compiled file and the options of commands follow from it."""

from contextlib import suppress
from dataclasses import fields

import pytest
import yaml

from components.jobs import PARAMETERS
from components.launchers.spec import JobSpec, from_fields
from kubedet import cli
from pipelines import cli as old
from pipelines import parameters
from pipelines.commands import options
from pipelines.compiler import compile_pipeline
from pipelines.parameters import LOCAL, REQUIRED, TABLE, TRAINING, CompileOptions

OTHER_OPTIONS = {"overrides": "--set KEY=VALUE", "job": "--job FIELD=VALUE"}
TYPES = {str: "STRING", int: "NUMBER_INTEGER", float: "NUMBER_DOUBLE", dict: "STRUCT"}


def compiled(folder, options):
    compile_pipeline(folder / "p.yaml", options)
    (spec, _) = yaml.safe_load_all((folder / "p.yaml").read_text())
    return spec["root"]["inputDefinitions"]["parameters"]


@pytest.fixture
def helped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")

    def help_of(command):
        with suppress(SystemExit):
            cli.main([*command.split(), "--help"])
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return help_of


@pytest.mark.parametrize(
    ("options", "further"),
    [
        (CompileOptions(volume=True, conditional=True), {"claim", "min_new_images", *TRAINING}),
        (CompileOptions(trials=2), {"study", "space"}),
        (CompileOptions(until="shards"), set()),
    ],
)
def test_the_compiled_file_has_the_parameters_of_the_table(tmp_path, options, further):
    declared = compiled(tmp_path, options)
    assert set(declared) == {item.name for item in TABLE.values() if not (item.only or item.trains)} | further
    for name, definition in declared.items():
        item = TABLE[name]
        assert definition["parameterType"] == TYPES[item.kind] and definition["description"]
        default = parameters.default(name, volume=options.volume)
        if (name == "data_root" and not options.volume) or (item.default is REQUIRED and name != "data_root"):
            assert "defaultValue" not in definition
        else:
            assert definition["defaultValue"] == default


@pytest.mark.parametrize("command", ["submit", "schedule create"])
def test_each_parameter_is_an_option(helped, command):
    shown = helped(command)
    for name, item in TABLE.items():
        if item.only == "trials":  # `kubedet tune` sets these from its options.
            assert not any(line.startswith(item.option) for line in shown)
        elif not item.metavar:
            assert any(line.startswith(OTHER_OPTIONS[name]) for line in shown)
        elif (name, command) != ("data_version", "schedule create"):  # A schedule gives each run its time.
            assert f"{item.option} {item.metavar} {item.help()}" in shown


def test_each_parameter_of_a_local_run_is_an_option(helped):
    shown = helped("run")
    for name, item in LOCAL.items():
        assert name == "overrides" or f"{item.option} {item.metavar} {item.help()}" in shown


def test_fields_of_every_job_are_described_by_the_job():
    assert set(PARAMETERS) <= {field.name for field in fields(JobSpec)} & set(TABLE)
    job = from_fields({"command": ["x"], "image": "i"})
    for name in ("nodes", "nproc", "gpus"):
        assert TABLE[name].default == getattr(job, name) and TABLE[name].kind is int


@pytest.mark.parametrize(
    ("source", "size"),
    [("sample", "small"), ("s3://bucket/x", "medium"), ("coco:2017,base=s3://mirror", "large")],
)
def test_a_source_has_a_size(source, size):
    words = ["submit", "--data-root", "s3://bucket/root", "--source", source]
    request = options.submission(old.make_parser("submit").parse_args(words), "a").parameters
    assert (request["step_cpu"], request["step_memory"]) == parameters.SIZES[size]
