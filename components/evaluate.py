"""Step 4: score the best checkpoint and write the report."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def evaluate(
    model: dsl.Input[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    rules: str = "",
) -> None:
    """Score the best checkpoint on the test split (validation where there is none).

    Args:
        model: manifest of the trained model.
        metrics: the COCO box metrics and the Open Images metric.
        report: the whole report, as a page.
        summary: the report in short, as text.
        rules: the gate's, whose verdict the report shows; empty takes the recipe's.
    """
    from components.steps import manifest, publish, publish_file, reported
    from components.verdict import rules_for
    from trainer import storage
    from trainer.evaluation.evaluate import evaluate as run

    with reported("evaluate"):
        trained = manifest(model)
        settings, held = rules_for(trained, rules)
        folder = storage.join(trained["output"], "evaluation")
        scored = run(trained["checkpoint"], trained["shards"], folder, settings, rules=held)
        publish(metrics, scored["metrics"], **scored["metrics"])
        publish_file(report, storage.join(folder, "report.html"))
        publish_file(summary, storage.join(folder, "report.md"))
