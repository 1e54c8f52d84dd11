"""Step 1b, once for each part: fetch its images."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def fetch(part: dict, recipe: str, overrides: dict) -> dict:
    """Fetch the images of a part; those that are there are not fetched again. Returns the part.

    Args:
        part: of those that the step `plan` returns.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
    """
    from components import partitions
    from components.steps import reported
    from trainer import recipes

    with reported("fetch"):
        return partitions.fetch(part, recipes.load(recipe, overrides).data)
