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

    search = (steps.manifest(shards), study, recipe, overrides, space, data_root, trials)
    arguments = (search, number, gpus)
    return steps.run("trial", "operations.tuning.search:train_trial", *arguments, secret=credentials)
