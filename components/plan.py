"""Step 1a: list the source, and divide the download and the sharding among pods."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def plan(
    source: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    data_version: str,
    partitions: int,
    credentials: str,
    trains: bool,
    min_new_images: int,
    min_drift: float,
) -> list:
    """List a source, write its annotations as tables, and divide the work.

    Args:
        source: see the pipeline's parameters.
        recipe: name of a recipe; its `data` section counts here.
        overrides: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        data_version: see the pipeline's parameters.
        partitions: see the pipeline's parameters.
        credentials: see the pipeline's parameters.
        trains: whether a training follows: its pretrained weights are then fetched first.
        min_new_images: see the pipeline's parameters.
        min_drift: see the pipeline's parameters.

    Returns:
        The parts, each as JSON; where a run does not pay, one that says so.
    """
    from components import steps

    request = (source, data_root, recipe, overrides, data_version, partitions)
    arguments = (*request, trains, min_new_images, min_drift)
    return steps.run("plan", "components.partitions:plan", *arguments, secret=credentials)
