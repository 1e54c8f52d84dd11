"""Step 2a, once for each part: write its shards."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def write(
    raw: dsl.Input[dsl.Dataset],
    part: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    credentials: str,
) -> str:
    """Write the shards of a part; those that are whole are left as they are.

    Args:
        raw: manifest of the raw images.
        part: of those that the step `plan` returns, as JSON.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: URI under which data is kept.
        credentials: Secret with the object store's keys.

    Returns:
        The part.
    """
    from components import steps

    given = (steps.manifest(raw), data_root, recipe, overrides, part)
    return steps.run("write", "components.partitions:write", *given, secret=credentials)
