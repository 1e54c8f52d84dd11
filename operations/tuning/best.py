"""The end of a search for hyper-parameters: the best of its trials, and the page of all."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def best(
    ended: list,
    trials: int,
    shards: dsl.Input[dsl.Dataset],
    study: str,
    recipe: str,
    overrides: dict,
    space: str,
    data_root: str,
    credentials: str,
    page: dsl.Output[dsl.HTML],
    configuration: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Write the best configuration as a recipe's file, and the page of the search, also beside the study.

    Args:
        ended: what `trial` returned of each trial.
        trials: how many there are to be.
        shards: manifest of the shards.
        study: see the pipeline's parameters.
        recipe: see the pipeline's parameters.
        overrides: see the pipeline's parameters.
        space: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        credentials: see the pipeline's parameters.
        page: history, importances and all trials.
        configuration: the best configuration, a file that `--recipe` takes.
        metrics: the best trial's number and its value of the metric.
    """
    from components import steps

    search = (steps.manifest(shards), study, recipe, overrides, space, data_root, trials)
    paths = (page.path, configuration.path)
    outcome = steps.run("best", "operations.tuning.work:choose", search, ended, paths, secret=credentials)
    steps.publish(metrics, outcome["metrics"], outcome["metrics"])
    configuration.metadata.update(outcome["shown"])
