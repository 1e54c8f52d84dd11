"""Step 3: train the detector with a training job."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(
    base_image=COMPONENT_IMAGE,
    install_kfp_package=False,
    # Tolerations and node selector of the task apply only to the training's pods; the other fields also
    # apply to the step's own pod.
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
    launcher: str,
    nodes: int,
    nproc: int,
    gpus: int,
    image: str,
    steps_image: str,
    job: dict,
    claim: str,
    output: str,
    run_id: str,
    gate: str,
    warm_start: str,
    credentials: str,
    model: dsl.Output[dsl.Model],
    task_config: dsl.TaskConfig,
) -> None:
    """Train the detector; a run that was stopped continues from its last checkpoint."""
    from components import jobs, steps
    from components.reports import publish_model
    from trainer.steps.manifests import Shards, TrainedModel, read

    request = jobs.Request(
        launcher=launcher,
        nodes=nodes,
        nproc=nproc,
        gpus=gpus,
        image=image,
        steps_image=steps_image,
        job=jobs.add_placement(job, task_config.tolerations, task_config.node_selector),
        credentials=credentials,
        claim=claim,
        run_id=run_id,
    )

    def work() -> TrainedModel:
        from components.training import train

        return train(read(shards.path, Shards), request, output, rules=gate, warm_start=warm_start)

    publish_model(steps.run_step("train", work, secret=credentials, adopts=True), model)
