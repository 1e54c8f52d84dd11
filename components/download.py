"""Step 1: download a source's images and annotations."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def download(
    source: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    min_new_images: int,
    trains: bool,
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
    raw: dsl.Output[dsl.Dataset],
) -> str:
    """Download a source's images and annotations to the data root; finished work is reused.

    Returns "train", or "nothing new" if too few images changed.
    """
    from components import environment, steps
    from components.data_job import DataJob
    from components.reports import publish_raw_data
    from trainer.steps.manifests import NothingNew, RawData

    data_job = DataJob(data_workers, launcher, job, claim, credentials, run_id, steps_image, cpu, memory)

    def work() -> RawData | NothingNew:
        from trainer.steps.download import download

        return download(
            source,
            data_root,
            recipe,
            overrides,
            min_new_images=min_new_images,
            trains=trains,
            run_id=environment.read_run_id(),
            launch=data_job.make_launch("download", data_root),
        )

    downloaded = steps.run_step("download", work, secret=credentials, adopts=True)
    return publish_raw_data(downloaded, raw, keep_runs=prune)
