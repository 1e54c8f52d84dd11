"""Step 5: write the model for serving, check it against the trained one, publish it, tell a registry."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def export(
    model: dsl.Input[dsl.Model],
    signing: str,
    registry: str,
    run_id: str,
    credentials: str,
    exported: dsl.Output[dsl.Model],
) -> None:
    """Write the model for serving, check it against the trained one on validation images, publish it.

    Args:
        model: manifest of the trained model.
        signing: see the pipeline's parameters.
        registry: see the pipeline's parameters.
        run_id: the run's id.
        credentials: see the pipeline's parameters.
        exported: manifest of the exported model.
    """
    from components import steps

    given = (steps.manifest(model), signing, registry, run_id)
    work = "components.publishing:export_and_publish"
    made = steps.run("export", work, *given, secret=credentials)
    shown = {"uri": made["model"], "name": made["name"], "model_version": made["model_version"]}
    steps.publish(exported, made, shown | {"registered": registry})
