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
    """Train one trial; one that was stopped goes on from its last checkpoint, one that has ended is left.

    Args:
        number: of the trial, from 0; a text, as every item of a loop.
        trials: how many there are to be.
        gpus: GPUs of this pod, a training process each.
        shards: manifest of the shards, the same for all trials.
        study: see the pipeline's parameters.
        recipe: see the pipeline's parameters.
        overrides: see the pipeline's parameters.
        space: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        credentials: see the pipeline's parameters.

    Returns:
        A line about the trial: its values, and how it ended.
    """
    from components import steps

    search = (steps.manifest(shards), study, recipe, overrides, space, data_root, trials)
    return steps.run("trial", "operations.tuning.work:train", search, number, gpus, secret=credentials)
