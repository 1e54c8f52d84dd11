"""Step 4: score the best checkpoint and write the report."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def evaluate(
    model: dsl.Input[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """Score the best checkpoint on the test split (validation where there is none).

    Args:
        model: manifest of the trained model.
        metrics: the COCO box metrics.
        report: the whole report, as a page.
        summary: the report in short, as text.
    """
    from components.steps import manifest, publish, publish_file, reported
    from trainer import config, storage
    from trainer.evaluation.evaluate import evaluate as run

    with reported("evaluate"):
        trained = manifest(model)
        settings = config.from_json(storage.read_bytes(trained["config"]), where=trained["config"])
        folder = storage.join(trained["output"], "evaluation")
        scored = run(trained["checkpoint"], trained["shards"], folder, settings)
        publish(metrics, scored["metrics"], **scored["metrics"])
        publish_file(report, storage.join(folder, "report.html"))
        publish_file(summary, storage.join(folder, "report.md"))
