"""Step 1b, once for each part: fetch its images."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def fetch(part: str, recipe: str, overrides: dict, credentials: str) -> str:
    """Fetch the images of a part; those that are there are not fetched again.

    Args:
        part: of those that the step `plan` returns, as JSON: Kubeflow makes text of an item of a list.
        recipe: name of a recipe; its `data` section counts here.
        overrides: see the pipeline's parameters.
        credentials: see the pipeline's parameters.

    Returns:
        The part.
    """
    from components import steps

    arguments = (part, recipe, overrides)
    return steps.run("fetch", "components.partitions:fetch", *arguments, secret=credentials)
