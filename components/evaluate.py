"""Step 4: score the best checkpoint, write the report, and decide whether the model is good enough."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def evaluate(
    model: dsl.Input[dsl.Model],
    rules: str,
    credentials: str,
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    verdict: dsl.Output[dsl.Markdown],
) -> str:
    """Score the best checkpoint on the test split (or validation), and apply the gate: "pass" or "fail"."""
    from components import steps

    arguments = (steps.manifest(model), rules, report.path, summary.path, verdict.path)
    scored = steps.run("evaluate", "components.scoring:score", *arguments, secret=credentials)
    steps.publish(metrics, scored["metrics"], scored["shown"])
    verdict.metadata.update(scored["verdict"])
    return scored["verdict"]["verdict"]
