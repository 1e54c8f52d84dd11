"""Step 3: train the detector on as many processes as asked for."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(
    base_image=COMPONENT_IMAGE,
    install_kfp_package=False,
    # Tolerations and node selector of the task are for the training's pods only; the rest is for the step's
    # own pod, too.
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
    """Train the detector; a run that was stopped continues from its last checkpoint."""
    from components import steps

    # Kubeflow pastes a run's parameters into `request`, as texts. It does not escape mappings such as `job`.
    asked_fields = request | {"credentials": credentials, "run_id": run_id}
    placement = (task_config.tolerations, task_config.node_selector)
    arguments = (steps.manifest(shards), output, data_root, recipe, overrides, asked_fields, job, placement)
    work = "components.training:train"
    published = steps.run("train", work, *arguments, rules, warm_start, secret=credentials, lasting=True)
    steps.publish(model, *published)
