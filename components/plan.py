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
) -> list:
    """List a source, write its annotations as tables, and divide the work.

    Args:
        source: see the step `download`.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: URI under which data is kept.
        data_version: name for the data as they are now, or a known one; empty is none.
        partitions: pods that share the work.
        credentials: Secret with the object store's keys.

    Returns:
        The parts, each as JSON.
    """
    from components import steps

    given = (source, data_root, recipe, overrides, data_version, partitions)
    return steps.run("plan", "components.partitions:plan", *given, secret=credentials)
