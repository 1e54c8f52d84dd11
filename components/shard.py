"""Step 2 with several pods: merge the tar shards that they have written, with an index."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def shard(
    raw: dsl.Input[dsl.Dataset],
    recipe: str,
    overrides: dict,
    data_root: str,
    credentials: str,
    parts: list,
    prune: int,
    shards: dsl.Output[dsl.Dataset],
    statistics: dsl.Output[dsl.HTML],
) -> str:
    """Put together the shards that several pods have written.

    One plain return value: a pipeline can branch on that alone.

    Args:
        raw: manifest of the raw images.
        recipe: name of a recipe; its `data` section counts here.
        overrides: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        credentials: see the pipeline's parameters.
        parts: those that other pods have written.
        prune: see the pipeline's parameters.
        shards: manifest of the shards.
        statistics: what they hold, as a page.

    Returns:
        "train", or "nothing new" where a run does not pay.
    """
    from components import occasion, steps

    arguments = (parts, steps.manifest(raw), recipe, overrides, data_root, statistics.path, prune)
    published = steps.run("shard", "components.preparation:shard", *arguments, secret=credentials)
    steps.publish(shards, *published)
    return occasion.word(published[0])
