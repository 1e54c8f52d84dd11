"""The compiled pipeline, in all its forms: the graph that a cluster takes."""

import json

import pytest
import yaml
from compiled_forms import FORMS, MAIN, STEPS, asked_of_the_launcher, graphs, of, tasks

from pipelines.compile import compile_pipeline
from pipelines.local import for_this_machine
from trainer.base.errors import StorageError
from trainer.model import recipes

PARAMETERS = {
    "data_root", "source", "recipe", "overrides", "gate", "launcher", "nodes", "nproc", "gpus", "image",
    "job", "output", "credentials", "data_version", "step_cpu", "step_memory", "signing", "registry",
    "notify", "warm_start", "prune",
}  # fmt: skip
ALONE = {
    "data_root",
    "source",
    "recipe",
    "overrides",
    "credentials",
    "data_version",
    "notify",
    "prune",
    "step_cpu",
    "step_memory",
}


@of("bucket", "shared", "data")
def test_weights_are_fetched_by_the_first_step_where_a_training_follows(spec):
    constant = tasks(spec)["prepare"]["inputs"]["parameters"]["trains"]["runtimeValue"]["constant"]
    assert constant is (spec["form"] != "data")


def test_the_form_for_a_bucket_requires_a_data_root(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == PARAMETERS
    assert [name for name, of in parameters.items() if not of.get("isOptional")] == ["data_root"]
    assert all(of["description"] for of in parameters.values())


@of("volume")
def test_the_form_for_a_volume_requires_a_claim(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == PARAMETERS | {"claim"}
    assert [name for name, of in parameters.items() if not of.get("isOptional")] == ["claim"]
    assert parameters["data_root"]["defaultValue"] == "/data/kubedet"


@of("data")
def test_data_alone_need_no_parameter_of_a_training(spec):
    assert set(spec["root"]["inputDefinitions"]["parameters"]) == ALONE
    assert tasks(spec)["cleanup"]["inputs"]["parameters"]["launcher"] == {"runtimeValue": {"constant": ""}}


@of(*FORMS)
def test_every_argument_of_a_step_is_told_and_the_pipelines_own_as_the_table_does(spec):
    root, described = spec["root"]["inputDefinitions"]["parameters"], set()
    for name in [*STEPS[spec["form"]], "cleanup"]:
        arguments = spec["components"][f"comp-{name}"]["inputDefinitions"]["parameters"]
        own = {key: of for key, of in arguments.items() if not key.startswith("pipelinechannel--")}
        for key, argument in own.items():
            assert argument["description"] and "see the pipeline" not in argument["description"], (name, key)
            if key in root and argument["description"] == root[key]["description"]:
                described.add(key)
    assert {"source", "data_root", "data_version", "credentials", "overrides"} <= described


def test_recipe_and_launcher_are_offered_as_lists(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert set(parameters["launcher"]["literals"]) == {"local", "kubernetes", "pytorchjob", "trainjob"}
    assert parameters["recipe"]["literals"] == list(recipes.RECIPES)
    assert {name for name, of in parameters.items() if "literals" in of} == {"launcher", "recipe"}


@of(*FORMS)
def test_no_retry_has_a_hidden_limit_of_hours(spec):
    """Argo gives a pod that is tried again what is left of it as its deadline, from the first try on."""
    for task in tasks(spec).values():
        if "retryPolicy" in task:
            assert int(task["retryPolicy"]["backoffMaxDuration"].removesuffix("s")) >= 30 * 24 * 3600


@of(*FORMS)
def test_a_clean_up_follows_however_the_steps_end(spec):
    ends = [
        (name, task)
        for name, task in spec["root"]["dag"]["tasks"].items()
        if task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    ]
    ((name, end),) = ends
    assert name == "cleanup" and len(spec["root"]["dag"]["tasks"]) == 2
    (steps,) = end["dependentTasks"]
    assert end["inputs"]["parameters"]["status"] == {"taskFinalStatus": {"producerTask": steps}}
    # Both get the run's id, from which the job's name follows.
    run_id = {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    assert end["inputs"]["parameters"]["run_id"] == run_id
    if "train" in STEPS[spec["form"]]:
        assert tasks(spec)["train"]["inputs"]["parameters"]["run_id"] == run_id


@of(*MAIN)
def test_only_a_pass_exports_and_the_condition_costs_no_pod(spec):
    all_tasks = tasks(spec)
    assert all_tasks["export"]["triggerPolicy"]["condition"].endswith("-Output'] == 'pass'")
    read = all_tasks["export"]["inputs"]["parameters"]["pipelinechannel--evaluate-Output"]
    assert read == {"taskOutputParameter": {"outputParameterKey": "Output", "producerTask": "evaluate"}}
    assert all_tasks["export"]["dependentTasks"] == ["evaluate", "train"]
    # A graph costs a pod: there is the root, and the one that the clean-up follows.
    assert len([name for name, component in spec["components"].items() if "dag" in component]) == 1


@of("conditional", "conditional_shared")
def test_a_model_is_made_only_where_the_data_are_worth_it(spec):
    assert set(spec["root"]["inputDefinitions"]["parameters"]) >= PARAMETERS | {"min_new_images", "min_drift"}
    steps = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    (held,) = [task for name, task in steps.items() if name.startswith("condition")]
    condition = held["triggerPolicy"]["condition"]
    assert condition == "inputs.parameter_values['pipelinechannel--prepare-Output'] == 'train'"
    read = held["inputs"]["parameters"]["pipelinechannel--prepare-Output"]
    assert read == {"taskOutputParameter": {"outputParameterKey": "Output", "producerTask": "prepare"}}
    # All that makes a model is below it; what it takes from outside is declared on the way.
    inner = spec["components"][held["componentRef"]["name"]]
    assert set(inner["dag"]["tasks"]) == {"train", "evaluate", "export"}
    declared = inner["inputDefinitions"]
    assert set(held["inputs"]["parameters"]) == set(declared["parameters"])
    assert set(held["inputs"]["artifacts"]) == set(declared["artifacts"])
    for task in inner["dag"]["tasks"].values():
        for source in task["inputs"]["parameters"].values():
            outside = source.get("componentInputParameter")
            assert outside is None or outside in declared["parameters"]
    assert inner["dag"]["tasks"]["export"]["triggerPolicy"]["condition"].endswith("-Output'] == 'pass'")


@of(*MAIN)
def test_without_the_condition_no_number_of_images_is_asked_for(spec):
    first = tasks(spec)["prepare"]
    assert first["inputs"]["parameters"]["min_new_images"] == {"runtimeValue": {"constant": 0.0}}
    assert first["inputs"]["parameters"]["min_drift"] == {"runtimeValue": {"constant": 0.0}}


@of("bucket", "shared")
def test_a_run_has_twelve_pods_and_two_for_each_further_partition(spec):
    """A driver for each graph, and for each step a driver and its own."""
    held = [graph for graph in graphs(spec) if "dag" in graph]
    pods = len(held) + 2 * (len(tasks(spec)) - len(held) + 1)
    assert pods == (14 if spec["form"] == "shared" else 12)


@of("search")
def test_trials_have_a_pod_each_and_the_best_follows_them(spec):
    asked = set(spec["root"]["inputDefinitions"]["parameters"])
    assert asked == ALONE | {"study", "space"}
    steps = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    (loop,) = [task for name, task in steps.items() if name.startswith("for-loop")]
    assert json.loads(loop["parameterIterator"]["items"]["raw"]) == ["0", "1", "2"]
    assert loop["iteratorPolicy"] == {"parallelismLimit": 2} and loop["dependentTasks"] == ["prepare"]
    inner = spec["components"][loop["componentRef"]["name"]]
    assert set(inner["dag"]["tasks"]) == {"trial"}
    item = loop["parameterIterator"]["itemInput"]
    given = inner["dag"]["tasks"]["trial"]["inputs"]["parameters"]
    assert given["number"] == {"componentInputParameter": item}
    # An item of another kind than the driver thinks it has would end the run.
    assert inner["inputDefinitions"]["parameters"][item]["parameterType"] == "STRING"
    assert given["trials"] == {"runtimeValue": {"constant": 3.0}}
    assert steps["best"]["inputs"]["parameters"]["ended"]["taskOutputParameter"]["producerTask"] in steps
    # All that changes what is searched is the same for the trials and whoever reads their study.
    for name in ("study", "recipe", "overrides", "space", "data_root"):
        source = {"componentInputParameter": f"pipelinechannel--{name}"}
        assert given[name] == steps["best"]["inputs"]["parameters"][name] == source


def test_a_registry_is_told_by_the_export(spec):
    inputs = tasks(spec)["export"]["inputs"]["parameters"]
    assert inputs["registry"] == {"componentInputParameter": "pipelinechannel--registry"}
    assert inputs["run_id"] == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}


@of(*MAIN)
def test_the_train_step_has_its_job_in_one_argument_and_further_fields_in_another(spec):
    job_arguments = asked_of_the_launcher(spec)
    of_run = {"launcher", "nodes", "nproc", "gpus", "image"}
    assert set(job_arguments) == {*of_run, "claim", "default_image"}
    for name in of_run:
        assert job_arguments[name] == {"componentInputParameter": f"pipelinechannel--{name}"}
    declared = spec["components"]["comp-train"]["inputDefinitions"]["parameters"]
    assert not set(job_arguments) & set(declared) and declared["job"]["parameterType"] == "STRUCT"


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        compile_pipeline(tmp_path / "file" / "pipeline.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_local_runs_neither_retry_nor_clean_up(spec):
    local = yaml.safe_load(for_this_machine(yaml.safe_dump(spec)))
    all_tasks = tasks(local)
    assert not any("retryPolicy" in task for task in all_tasks.values())
    assert set(all_tasks) == set(tasks(spec)) - {"cleanup"}


@of("shared", "conditional_shared")
def test_assistants_start_with_the_first_step_and_no_step_waits_for_them(spec):
    steps = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    if spec["form"] == "shared":
        assistant, partitions = steps["assist"], 2.0
    else:
        # As tasks of their own so many would make the compiled file too large.
        (assistant,) = [task for name, task in steps.items() if name.startswith("for-loop")]
        assert len(json.loads(assistant["parameterIterator"]["items"]["raw"])) == 19
        assert set(spec["components"][assistant["componentRef"]["name"]]["dag"]["tasks"]) == {"assist"}
        partitions = 20.0
    assert not assistant.get("dependentTasks") and not steps["prepare"].get("dependentTasks")
    after = {name for task in steps.values() for name in task.get("dependentTasks", [])}
    assert not any(name.startswith(("assist", "for-loop")) for name in after)
    shared = steps["prepare"]["inputs"]["parameters"]["partitions"]
    assert shared == {"runtimeValue": {"constant": partitions}}
