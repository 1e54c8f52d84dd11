"""Step 4: score the best checkpoint, write the report, and decide whether the model is good enough."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def evaluate(
    model: dsl.Input[dsl.Model],
    gate: str,
    credentials: str,
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    verdict: dsl.Output[dsl.Markdown],
) -> str:
    """Score the best checkpoint on the test split (or validation), and return the gate's "pass" or "fail"."""
    from components import steps
    from components.reports import publish_scores
    from trainer.steps.manifests import Scores, TrainedModel, read

    trained = read(model.path, TrainedModel)

    def work() -> Scores:
        from trainer.steps.evaluate import evaluate

        return evaluate(trained, gate)

    scores = steps.run_step("evaluate", work, secret=credentials)
    return publish_scores(scores, trained, metrics, report, summary, verdict)
