"""Step 2: clean the annotations, and convert images and boxes to tar shards."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def convert_to_shards(
    raw: dsl.Input[dsl.Dataset],
    prune: int,
    data_workers: int,
    launcher: str,
    job: dict,
    claim: str,
    run_id: str,
    steps_image: str,
    cpu: str,
    memory: str,
    credentials: str,
    shards: dsl.Output[dsl.Dataset],
    statistics: dsl.Output[dsl.HTML],
) -> None:
    """Clean the annotations, and write tar shards with an index; finished shards are reused."""
    from components import steps
    from components.data_job import DataJob
    from components.reports import publish_shards
    from trainer.steps.manifests import RawData, Shards, read

    data_job = DataJob(data_workers, launcher, job, claim, credentials, run_id, steps_image, cpu, memory)

    def work() -> Shards:
        from trainer.steps.shard import shard

        data = read(raw.path, RawData)
        return shard(data, data_job.make_launch("shard", data.data_root))

    written = steps.run_step("convert-to-shards", work, secret=credentials, adopts=True)
    publish_shards(written, shards, statistics, keep_runs=prune)
