"""The step `download`: store the images and annotations of a source."""

from collections.abc import Callable

from trainer.config.types import Overrides
from trainer.data import download as downloading
from trainer.launching.shared_work import SharedWork
from trainer.model import recipes
from trainer.steps import retrain_condition, starting_weights
from trainer.steps.manifests import NothingNew, RawData
from trainer.steps.records import NothingNewRecord, utc_timestamp


def download(
    source: str,
    data_root: str,
    recipe: str = "debug",
    overrides: Overrides | None = None,
    *,
    min_new_images: int = 0,
    trains: bool = False,
    run_id: str = "",
    launch: Callable[[tuple[str, ...]], None] | None = None,
) -> RawData | NothingNew:
    """Download the images and annotations of a source; stored images are not fetched again.

    Args:
        source: see `trainer.data.sources.parse`.
        data_root: URI under which the data is stored.
        recipe: name of the recipe; its section `data` selects images and boxes.
        overrides: values that replace those of the recipe.
        min_new_images: skip the download if fewer images changed since the current model; 0 never skips.
        trains: also fetch and check the pretrained weights, so that errors appear before hours of work.
        run_id: the run's id, for the record of a run that does not train.
        launch: runs `python -m trainer` with the given arguments in several processes that share the work. If
            None, this process downloads alone.
    """
    overrides = overrides or {}
    config = recipes.load_with_packages(recipe, overrides)
    retrain_condition.check_min_new_images(min_new_images)
    listed = None
    if min_new_images:
        listed = downloading.plan(source, data_root, config.data)
        if skipped := retrain_condition.reason_to_skip(listed, data_root, config, min_new_images):
            if run_id:
                NothingNewRecord(run_id, skipped.since, skipped.found, utc_timestamp()).write(data_root)
            return skipped
    if trains:
        starting_weights.fetch_and_check(recipe, overrides, data_root)
    if launch:
        settings = recipes.to_arguments(recipe, overrides)
        launch(("download", "--source", source, "--data-root", data_root, *settings))
    if listed and listed.kind == "plan":
        folder = downloading.fetch(listed, config.data, SharedWork())
    else:
        folder = downloading.download(source, data_root, config.data)
    return RawData(data_root=data_root, folder=folder, recipe=recipe, overrides=overrides)
