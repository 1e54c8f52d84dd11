"""Step 3: train the detector on as many processes as asked for."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def train(
    shards: dsl.Input[dsl.Dataset],
    recipe: str,
    overrides: dict,
    launcher: str,
    nodes: int,
    nproc: int,
    gpus: int,
    image: str,
    default_image: str,
    job: dict,
    credentials: str,
    claim: str,
    data_root: str,
    output: str,
    run_id: str,
    rules: str,
    model: dsl.Output[dsl.Model],
) -> None:
    """Train the detector; a run that was stopped goes on from its last checkpoint.

    Args:
        shards: manifest of the shards.
        recipe: name of a recipe.
        overrides: dotted configuration keys and their values.
        launcher: what starts the processes: `local` or `kubernetes`.
        nodes: machines.
        nproc: processes on each machine; 0 is one for each GPU, or one.
        gpus: GPUs of each machine.
        image: container image of the training; empty is `default_image`.
        default_image: the steps' own container image.
        job: further fields of the job, as `components/launchers/spec.py` names them.
        credentials: Secret with the object store's keys.
        claim: PersistentVolumeClaim that holds the data; empty is none.
        data_root: URI under which data is kept.
        output: URI of the run's folder; empty is `<data_root>/runs/<run>`.
        run_id: the run's id.
        rules: the gate's, which may name classes that the data do not have; empty takes the recipe's.
        model: manifest of the trained model.
    """
    from components import jobs, launchers, versions
    from components.steps import manifest, publish, reported
    from components.training import folder_of, prepare, result

    with reported("train"):
        data = manifest(shards)
        folder = folder_of(output, data_root, data, run_id)
        request = jobs.Request(launcher, nodes, nproc, gpus, image, job, credentials, claim, run_id)
        what = prepare(
            data["uri"], folder, recipe, overrides, request, default_image=default_image, rules=rules
        )
        launchers.run(launcher, what)
        trained = result(data["uri"], folder) | versions.label(data)
        shown = trained["metrics"] | versions.label(data)
        publish(model, trained, checkpoint=trained["checkpoint"], uri=folder, **shown)
