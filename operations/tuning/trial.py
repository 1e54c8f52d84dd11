"""One trial of a search for hyper-parameters, in a pod of its own."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def trial(
    number: str,
    trials: int,
    gpus: int,
    shards: dsl.Input[dsl.Dataset],
    study: str,
    recipe: str,
    overrides: dict,
    space: str,
    data_root: str,
    credentials: str,
) -> str:
    """Train one trial, or continue it from its last checkpoint; return a line about it."""
    from components import steps

    search = (data_root, study, recipe, overrides, space, steps.manifest(shards)["uri"], trials)
    work = "operations.tuning.search:train_trial"
    return steps.run("trial", work, number, gpus, *search, secret=credentials)
