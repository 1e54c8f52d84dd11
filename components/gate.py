"""Step 5: decide whether the model is good enough to be exported."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def gate(
    model: dsl.Input[dsl.Model],
    metrics: dsl.Input[dsl.Metrics],
    rules: str,
    verdict: dsl.Output[dsl.Markdown],
) -> str:
    """Hold the metrics against rules. One plain return value: a pipeline can branch on that alone.

    Args:
        model: manifest of the trained model.
        metrics: the COCO box metrics.
        rules: `metric >= number`, several parted by commas; empty takes the recipe's.
        verdict: what was decided and why.

    Returns:
        "pass" or "fail".
    """
    from components.steps import manifest, reported
    from components.verdict import judge

    with reported("gate"):
        return judge(manifest(model), manifest(metrics), rules, verdict)
