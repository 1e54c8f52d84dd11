"""The end of every run, however it went: nothing of it stays behind."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def cleanup(launcher: str, run_id: str) -> None:
    """Delete the run's training job if it is still going on: its step may have been killed.

    Args:
        launcher: what started the training.
        run_id: the run's id.
    """
    from components import jobs
    from components.steps import reported

    with reported("cleanup"):
        jobs.remove(launcher, run_id)
