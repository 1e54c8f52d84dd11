"""The end of a search for hyper-parameters: the best of its trials, and the page of all."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def best(
    ended: list,
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
    """Write the best configuration as a recipe's file, and the page of the search."""
    from components import steps

    search = (data_root, study, recipe, overrides, space, steps.manifest(shards)["uri"], len(ended))
    work, paths = "operations.tuning.search:choose", (page.path, configuration.path)
    outcome = steps.run("best", work, paths, *search, secret=credentials)
    steps.publish(metrics, outcome["metrics"], outcome["metrics"])
    configuration.metadata.update(outcome["shown"])
