"""Step 6: write the model for serving, check it against the trained one, and publish it."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def export(model: dsl.Input[dsl.Model], signing: str, exported: dsl.Output[dsl.Model]) -> None:
    """Write the model for serving and check it against the trained one on validation images.

    Args:
        model: manifest of the trained model.
        signing: Secret with the key that signs it, mounted in the step's pod.
        exported: manifest of the exported model.
    """
    from components.publishing import export_and_publish
    from components.signing import mounted_key
    from components.steps import manifest, publish, reported

    with reported("export"):
        made = export_and_publish(manifest(model), mounted_key(signing))
        publish(exported, made, uri=made["model"], name=made["name"], model_version=made["model_version"])
