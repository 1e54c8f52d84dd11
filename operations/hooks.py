"""Hooks of operations in the steps of a run; the entry point `operations` of the group `kubedet.hooks`."""

from components.hooks import Hooks, StepEnd


class _Operations(Hooks):
    """Imports features lazily, so that the parent process of a step stays small."""

    def on_step_end(self, end: StepEnd) -> None:
        if end.outcome is not None:
            from operations import notifications

            notifications.notify(end.outcome, end.folder)
        if end.keep_runs:
            from operations import retention

            retention.prune_after_step(end.data_root, end.keep_runs)


hooks = _Operations()
