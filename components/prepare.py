"""Steps 1 and 2 in one pod: bring the source's images and annotations, and write them as shards."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def prepare(
    source: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    data_version: str,
    credentials: str,
    trains: bool,
    min_new_images: int,
    min_drift: float,
    prune: int,
    partitions: int,
    raw: dsl.Output[dsl.Dataset],
    shards: dsl.Output[dsl.Dataset],
    statistics: dsl.Output[dsl.HTML],
) -> str:
    """Bring a source's images and annotations under the data root, clean them and write tar shards.

    What is there already is found again. One plain return value: a pipeline can branch on that alone.

    Args:
        source: see the pipeline's parameters.
        recipe: name of a recipe; its `data` section counts here.
        overrides: see the pipeline's parameters.
        data_root: see the pipeline's parameters.
        data_version: see the pipeline's parameters.
        credentials: see the pipeline's parameters.
        trains: whether a training follows: its pretrained weights are then fetched first.
        min_new_images: see the pipeline's parameters.
        min_drift: see the pipeline's parameters.
        prune: see the pipeline's parameters.
        partitions: pods that share the work: this one and those of the step `assist`.
        raw: manifest of the raw images.
        shards: manifest of the shards.
        statistics: what they hold, as a page.

    Returns:
        "train", or "nothing new" where a run does not pay.
    """
    from components import hooks, steps

    request = (source, recipe, overrides, data_root, data_version, statistics.path)
    arguments = (*request, trains, min_new_images, min_drift, prune, partitions)
    raw_published, shards_published = steps.run(
        "prepare", "components.preparation:prepare", *arguments, secret=credentials
    )
    steps.publish(raw, *raw_published)
    steps.publish(shards, *shards_published)
    return hooks.NOTHING_NEW if shards_published[0]["kind"] == hooks.NOTHING_NEW else hooks.TRAIN
