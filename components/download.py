"""Step 1: bring the source's images and annotations under the data root."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def download(source: str, recipe: str, overrides: dict, data_root: str, raw: dsl.Output[dsl.Dataset]) -> None:
    """Bring a source's images and annotations under the data root; a finished one is found again.

    Args:
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: URI under which data is kept.
        raw: manifest of the raw images.
    """
    from components.steps import publish, reported
    from trainer import recipes
    from trainer.data.download import download as run

    with reported("download"):
        made = run(source, data_root, recipes.load(recipe, overrides).data)
        counts = {f"{split}_{key}": n for split, of in made["splits"].items() for key, n in of.items()}
        publish(raw, made, uri=made["uri"], fingerprint=made["fingerprint"], source=source, **counts)
