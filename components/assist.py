"""Runs next to the step `prepare`, in a pod of its own: do parts of its work."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def assist(recipe: str, overrides: dict, data_root: str, credentials: str) -> None:
    """Fetch images and write shards for the step `prepare` of the same run, until that step needs no more.

    It ends without work if all data are there. It never fails a run: `prepare` does what this step does not.

    Args:
        recipe: name of a recipe; its `data` section counts here.
        overrides: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        credentials: see the pipeline's parameters.
    """
    from components import steps

    arguments = (data_root, recipe, overrides)
    steps.run("assist", "components.sharing:assist", *arguments, secret=credentials, needed=False)
