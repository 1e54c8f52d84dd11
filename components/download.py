"""Step 1, where pods share it: bring the source's images and annotations under the data root."""

from kfp import dsl

from components.images import COMPONENT_IMAGE


@dsl.component(base_image=COMPONENT_IMAGE, install_kfp_package=False)
def download(
    source: str,
    recipe: str,
    overrides: dict,
    data_root: str,
    data_version: str,
    credentials: str,
    parts: list,
    raw: dsl.Output[dsl.Dataset],
) -> None:
    """Put together the images and annotations that several pods have brought under the data root.

    Args:
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        data_root: URI under which data is kept.
        data_version: name for the data as they are now, or a known one; empty is none.
        credentials: Secret with the object store's keys.
        parts: those that other pods have fetched.
        raw: manifest of the raw images.
    """
    from components import steps

    given = (parts, source, recipe, overrides, data_root, data_version)
    made = steps.run("download", "components.preparation:download", *given, secret=credentials)
    steps.publish(raw, *made)
