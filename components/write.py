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
        overrides: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        credentials: see the pipeline's parameters.

    Returns:
        The part.
    """
    from components import steps

    arguments = (steps.manifest(raw), data_root, recipe, overrides, part)
    return steps.run("write", "components.partitions:write", *arguments, secret=credentials)
