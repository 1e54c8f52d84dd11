"""Step 1: bring the source's images and annotations under the data root."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def download(
    source: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    data_version: str,
    raw: dsl.Output[dsl.Dataset],
    parts: list = [],  # noqa: B006 (kfp copies it into the compiled file)
) -> None:
    """Bring a source's images and annotations under the data root; a finished one is found again.

    Args:
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: URI under which data is kept.
        data_version: name for the data as they are now, or a known one; empty is none.
        raw: manifest of the raw images.
        parts: those that other pods have fetched; without, all is fetched here.
    """
    from components import partitions, versions
    from components.steps import publish, reported
    from trainer import recipes

    with reported("download"):
        made = partitions.fetched(
            parts, source, data_root, recipes.load(recipe, overrides).data, data_version
        )
        shown = {f"{split}_{key}": n for split, of in made["splits"].items() for key, n in of.items()}
        shown |= versions.label(made)
        publish(raw, made, uri=made["uri"], fingerprint=made["fingerprint"], source=source, **shown)
