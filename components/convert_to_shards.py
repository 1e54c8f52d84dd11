"""Step 2: clean the annotations, and convert images and boxes to tar shards."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def convert_to_shards(
    raw: dsl.Input[dsl.Dataset],
    prune: int,
    credentials: str,
    shards: dsl.Output[dsl.Dataset],
    statistics: dsl.Output[dsl.HTML],
) -> None:
    """Clean the annotations, and write tar shards with an index; complete shards are kept."""
    from components import steps
    from components.reports import report_shards
    from trainer.steps.manifests import RawData, Shards, read

    def work() -> Shards:
        from trainer.steps.shard import shard

        return shard(read(raw.path, RawData))

    written = steps.run_step("convert-to-shards", work, secret=credentials)
    report_shards(written, shards, statistics, keep_runs=prune)
