"""Step 5: export the model for serving, check it against the trained one, publish and register it."""

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
    """Export the model for serving, check it against the trained one on validation images, publish it."""
    from components import steps

    arguments = (steps.manifest(model), signing, registry, run_id)
    work = "components.publishing:export_and_publish"
    bundle = steps.run("export", work, *arguments, secret=credentials)
    shown = {"uri": bundle["model"], "name": bundle["name"], "model_version": bundle["model_version"]}
    steps.publish(exported, bundle, shown | {"registered": registry})
