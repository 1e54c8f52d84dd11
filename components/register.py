"""Optional step after the export: tell the Kubeflow Model Registry of the model."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def register(exported: dsl.Input[dsl.Model], server: str, run_id: str) -> None:
    """Register the exported model's version; a version that is registered stays as it is.

    Args:
        exported: manifest of the exported model.
        server: URL of the registry, e.g. http://model-registry-service.kubeflow:8080.
        run_id: the run's id.
    """
    from components.registry import register_model
    from components.steps import manifest, reported

    with reported("register"):
        register_model(manifest(exported), server, run_id)
