"""Step 2: clean the annotations and write the images as tar shards with an index."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def shard(
    raw: dsl.Input[dsl.Dataset],
    recipe: str,
    overrides: dict,
    data_root: str,
    shards: dsl.Output[dsl.Dataset],
    statistics: dsl.Output[dsl.HTML],
    parts: list = [],  # noqa: B006 (kfp copies it into the compiled file)
) -> None:
    """Clean the annotations and write the images as tar shards; finished ones are found again.

    Args:
        raw: manifest of the raw images.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: URI under which data is kept.
        shards: manifest of the shards.
        statistics: what they hold, as a page.
        parts: those that other pods have written; without, all is written here.
    """
    from components import versions
    from components.steps import manifest, publish, reported
    from trainer import recipes, storage
    from trainer.data.page import page
    from trainer.data.shards import join
    from trainer.data.shards import shard as run

    with reported("shard"):
        images = manifest(raw)
        made = (join if parts else run)(images, data_root, recipes.load(recipe, overrides).data)
        counts = {f"{s}_{key}": of[key] for s, of in made["splits"].items() for key in ("samples", "boxes")}
        small = {key: made[key] for key in ("kind", "version", "uri", "fingerprint", "categories")}
        shown = counts | versions.label(images)
        publish(shards, small | shown, uri=made["uri"], fingerprint=made["fingerprint"], **shown)
        storage.write_bytes(statistics.path, page(made).encode(), sync=False)
