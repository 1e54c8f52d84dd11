"""A step that trains one trial of a hyper-parameter search, in its own pod."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def trial(
    number: str,
    trials: int,
    gpus: int,
    shards: dsl.Input[dsl.Dataset],
    study: str,
    space: str,
    credentials: str,
) -> str:
    """Train one trial, or continue it from its last checkpoint; return a line about it."""
    from components import steps
    from trainer.steps.manifests import Shards, read

    def work() -> str:
        from operations.tuning import search

        return search.train_trial(
            search.open_study(read(shards.path, Shards), study, space, trials), int(number), gpus
        )

    return steps.run_step("trial", work, secret=credentials)
