"""Does parts of the work of the step `prepare`, in another pod."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def assist(recipe: str, overrides: dict, data_root: str, credentials: str) -> None:
    """Fetch images and write shards for the step `prepare` of the same run, until that step needs no more.

    It never fails a run: `prepare` does the parts that this step does not do.
    """
    from components import steps

    arguments = (data_root, recipe, overrides)
    steps.run("assist", "components.sharing:assist", *arguments, secret=credentials, needed=False)
