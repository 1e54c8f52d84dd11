"""Steps 1 and 2 in one pod: fetch the source's images and annotations, and write them as shards."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def prepare(
    source: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    data_version: str,
    scheduled: str,
    credentials: str,
    trains: bool,
    min_new_images: int,
    prune: int,
    raw: dsl.Output[dsl.Dataset],
    shards: dsl.Output[dsl.Dataset],
    statistics: dsl.Output[dsl.HTML],
) -> str:
    """Fetch a source's images and annotations into the data root, clean them and write tar shards.

    Finished work is reused. Returns "train", or "nothing new" if there is no reason to train.
    """
    from components import environment, hooks, steps

    version = environment.expand_version(data_version, scheduled)
    request = (source, recipe, overrides, data_root, version, statistics.path)
    arguments = (*request, trains, min_new_images, prune)
    raw_published, shards_published = steps.run(
        "prepare", "components.preparation:prepare", *arguments, secret=credentials
    )
    steps.publish(raw, *raw_published)
    steps.publish(shards, *shards_published)
    return hooks.NOTHING_NEW if shards_published[0]["kind"] == hooks.NOTHING_NEW else hooks.TRAIN
