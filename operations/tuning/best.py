"""The last step of a hyper-parameter search: chooses the best trial, and writes a table of all trials."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def best(
    ended: list,
    shards: dsl.Input[dsl.Dataset],
    study: str,
    space: str,
    credentials: str,
    table: dsl.Output[dsl.Markdown],
    configuration: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Write the best configuration as a recipe file, and a table of the trials."""
    from components import steps
    from operations.tuning.choice import BestTrial, report_best_trial
    from trainer.steps.manifests import Shards, read

    def work() -> BestTrial:
        from operations.tuning import search

        return search.choose_best(search.open_study(read(shards.path, Shards), study, space, len(ended)))

    report_best_trial(steps.run_step("best", work, secret=credentials), table, configuration, metrics)
