"""The exit handler of every run: it deletes the training job and reports what failed."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def cleanup(
    launcher: str,
    run_id: str,
    status: dsl.PipelineTaskFinalStatus,
    outcome: dsl.Output[dsl.Markdown],
) -> None:
    """Delete the run's training job if it is still running, and report how and why the run ended."""
    from components import steps

    def work() -> dict[str, str]:
        from components import run_end

        return run_end.clean_up(launcher, run_id, status.state, outcome.path)

    outcome.metadata.update(steps.run_step("cleanup", work))
