"""Step 3: train the detector on as many processes as asked for."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def train(
    shards: dsl.Input[dsl.Dataset],
    recipe: str,
    overrides: dict,
    nodes: int,
    nproc: int,
    launcher: str,
    data_root: str,
    output: str,
    run_id: str,
    model: dsl.Output[dsl.Model],
) -> None:
    """Train the detector; a run that was stopped goes on from its last checkpoint.

    Args:
        shards: manifest of the shards.
        recipe: name of a recipe.
        overrides: dotted configuration keys and their values.
        nodes: machines.
        nproc: processes on each machine.
        launcher: what starts the processes: `local`.
        data_root: URI under which data is kept.
        output: URI of the run's folder; empty is `<data_root>/runs/<run_id>`.
        run_id: name of the run where `output` is empty.
        model: manifest of the trained model.
    """
    from components import launchers
    from components.steps import manifest, publish, reported
    from components.training import prepare, result
    from trainer import storage

    with reported("train"):
        folder = output or storage.join(data_root, "runs", run_id)
        data = manifest(shards)["uri"]
        launchers.run(launcher, prepare(data, folder, recipe, overrides, nodes, nproc))
        trained = result(data, folder)
        publish(model, trained, checkpoint=trained["checkpoint"], uri=folder, **trained["metrics"])
