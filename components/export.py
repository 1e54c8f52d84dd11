"""Step 5: export the model for serving, check it against the trained one, and publish it."""

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
    """Export the model for serving, check it against the trained one, and publish it."""
    from components import environment, steps
    from components.reports import publish_bundle
    from trainer.steps.manifests import Bundle, TrainedModel, read

    trained = read(model.path, TrainedModel)

    def work() -> Bundle:
        from components.model_registry import register_model
        from trainer.steps.export import export

        bundle = export(trained, signing_key=environment.find_signing_key(signing), registry=registry)
        if registry:
            register_model(bundle.model, registry, run_id)
        return bundle

    publish_bundle(steps.run_step("export", work, secret=credentials), trained, exported)
