"""Step 1 with several pods: merge the images and annotations that they have fetched under the data root."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def download(
    source: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    data_version: str,
    credentials: str,
    parts: list,
    raw: dsl.Output[dsl.Dataset],
) -> None:
    """Put together the images and annotations that several pods have brought under the data root.

    Args:
        source: see the pipeline's parameters.
        recipe: name of a recipe; its `data` section counts here.
        overrides: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        data_version: see the pipeline's parameters.
        credentials: see the pipeline's parameters.
        parts: those that other pods have fetched.
        raw: manifest of the raw images.
    """
    from components import steps

    arguments = (parts, source, recipe, overrides, data_root, data_version)
    published = steps.run("download", "components.preparation:download", *arguments, secret=credentials)
    steps.publish(raw, *published)
