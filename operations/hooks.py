"""What operations does in the steps of a run; the entry point `operations` of the group `kubedet.hooks`."""

from components.hooks import HELD_BACK, End, Hooks, Listing, NothingNew, Outcome


class _Operations(Hooks):
    """Imports each feature when it is needed: the process that waits for a step's work stays small."""

    def before_training(self, listing: Listing) -> NothingNew | None:
        from operations import retrain_condition

        condition = retrain_condition.Condition(listing.min_new_images, listing.min_drift)
        return retrain_condition.nothing_new(listing.planned, listing.data_root, listing.config, condition)

    def after_gate(self, outcome: Outcome, folder: str) -> None:
        from operations import notifications

        # Of a model that passed is told when it is published.
        if outcome.event == HELD_BACK:
            notifications.tell(outcome, folder)

    def at_end(self, end: End) -> None:
        if end.outcome is not None:
            from operations import notifications

            notifications.tell(end.outcome, end.folder)
        if end.keep_runs:
            from operations.retention import pruning

            pruning.prune_after(end.data_root, end.keep_runs)
        if end.began:
            from operations import openlineage

            openlineage.tell(end)


hooks = _Operations()
