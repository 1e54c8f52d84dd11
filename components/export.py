"""Step 6: write the model for serving and check it against the trained one."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def export(model: dsl.Input[dsl.Model], exported: dsl.Output[dsl.Model]) -> None:
    """Write the model for serving and check it against the trained one on validation images.

    Args:
        model: manifest of the trained model.
        exported: manifest of the exported model.
    """
    from components.steps import manifest, publish, reported
    from trainer import config, storage
    from trainer.export.export import export as run

    with reported("export"):
        trained = manifest(model)
        settings = config.from_json(storage.read_bytes(trained["config"]), where=trained["config"])
        folder = storage.join(trained["output"], "model")
        publish(exported, run(trained["checkpoint"], trained["shards"], folder, settings), uri=folder)
