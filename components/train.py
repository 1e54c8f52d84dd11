"""Step 3: train the detector on as many processes as asked for."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(
    base_image=COMPONENT_IMAGE,
    install_kfp_package=False,
    # Where a task of a pipeline is told to run is meant for the pods that train; the rest is for the one
    # that starts them and waits, too.
    task_config_passthroughs=[
        dsl.TaskConfigField.KUBERNETES_TOLERATIONS,
        dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR,
        dsl.TaskConfigPassthrough(dsl.TaskConfigField.RESOURCES, apply_to_task=True),
        dsl.TaskConfigPassthrough(dsl.TaskConfigField.ENV, apply_to_task=True),
        dsl.TaskConfigPassthrough(dsl.TaskConfigField.KUBERNETES_VOLUMES, apply_to_task=True),
    ],
)
def train(
    shards: dsl.Input[dsl.Dataset],
    recipe: str,
    overrides: dict,
    request: dict,
    job: dict,
    credentials: str,
    data_root: str,
    output: str,
    run_id: str,
    rules: str,
    warm_start: str,
    model: dsl.Output[dsl.Model],
    task_config: dsl.TaskConfig,
) -> None:
    """Train the detector; a run that was stopped goes on from its last checkpoint.

    Args:
        shards: manifest of the shards.
        recipe: name of a recipe.
        overrides: see the pipeline's parameters.
        request: what is asked of the launcher, as `components.jobs.Request` names it, every value a text.
        job: further fields of the job, as `components/launchers/spec.py` names them.
        credentials: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        output: see the pipeline's parameters.
        run_id: the run's id.
        rules: the gate's, which may name classes that the data do not have; empty takes the recipe's.
        warm_start: see the pipeline's parameters.
        model: manifest of the trained model.
        task_config: tolerations and node selectors that were set on this task.
    """
    from components import steps

    # Kubeflow pastes a run's parameters into `request`, as texts; a mapping, as `job` is, would stand there
    # unescaped, and nobody could read it.
    asked_fields = request | {"credentials": credentials, "run_id": run_id}
    placement = (task_config.tolerations, task_config.node_selector)
    arguments = (steps.manifest(shards), output, data_root, recipe, overrides, asked_fields, job, placement)
    work = "components.training:train"
    published = steps.run("train", work, *arguments, rules, warm_start, secret=credentials, lasting=True)
    steps.publish(model, *published)
