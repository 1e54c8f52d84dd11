"""The compiled pipeline: what a cluster takes."""

import subprocess
import sys

import pytest
import yaml

from components.images import COMPONENT_IMAGE
from pipelines import TITLES
from pipelines.compile import compile_pipeline
from pipelines.local import without_retries
from trainer.errors import StorageError


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path)
    return yaml.safe_load(path.read_text())


def tasks(spec):
    graphs = [spec["root"], *spec["components"].values()]
    return {name: task for graph in graphs for name, task in graph.get("dag", {}).get("tasks", {}).items()}


def test_parameters_are_few_and_have_defaults(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == {
        "data_root", "source", "recipe", "overrides", "nodes", "nproc", "launcher", "output", "gate",
    }  # fmt: skip
    assert [name for name, of in parameters.items() if not of.get("isOptional")] == ["data_root"]


def test_every_step_has_image_title_resources_retries_and_no_cache(spec):
    executors = spec["deploymentSpec"]["executors"]
    found = tasks(spec)
    assert set(TITLES) <= set(found)
    for name, title in TITLES.items():
        assert found[name]["taskInfo"]["name"] == title
        assert found[name]["retryPolicy"]["maxRetryCount"] >= 1
        assert not found[name].get("cachingOptions", {}).get("enableCache")
        container = executors[f"exec-{name}"]["container"]
        assert container["image"] == COMPONENT_IMAGE
        assert (
            container["resources"]["resourceCpuRequest"] and container["resources"]["resourceMemoryRequest"]
        )


def test_only_a_pass_exports(spec):
    (condition,) = [
        task
        for task in tasks(spec).values()
        if "triggerPolicy" in task and "condition" in task["triggerPolicy"]
    ]
    assert "'pass'" in condition["triggerPolicy"]["condition"]


def test_no_secret_and_no_path_of_this_machine(spec):
    text = yaml.safe_dump(spec).lower()
    for word in ("secretkey", "accesskey", "password", sys.prefix.lower()):
        assert word not in text


def test_the_image_can_be_another_registrys(tmp_path):
    code = "from pathlib import Path; from pipelines.compile import compile_pipeline; "
    code += f"compile_pipeline(Path({str(tmp_path / 'p.yaml')!r}))"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"KUBEDET_IMAGE": "registry.example/team/kubedet:7", "PATH": ""},
    )
    images = {
        executor["container"]["image"]
        for executor in yaml.safe_load((tmp_path / "p.yaml").read_text())["deploymentSpec"][
            "executors"
        ].values()
    }
    assert images == {"registry.example/team/kubedet:7"}


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        compile_pipeline(tmp_path / "file" / "pipeline.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_local_runs_do_not_retry(spec):
    local = yaml.safe_load(without_retries(yaml.safe_dump(spec)))
    assert not any("retryPolicy" in task for task in tasks(local).values())
    assert set(tasks(local)) == set(tasks(spec))
