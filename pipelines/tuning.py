"""A search for hyper-parameters on this machine."""

from collections.abc import Mapping
from pathlib import Path

from operations.tuning import search, space
from trainer import storage
from trainer.base.errors import check_name
from trainer.model import recipes
from trainer.steps.download import download
from trainer.steps.manifests import RawData
from trainer.steps.shard import shard


def tune(
    source: str,
    recipe: str,
    overrides: Mapping[str, object],
    data_root: str,
    output: str,
    space_file: str,
    trials: int,
    parallel: int,
    name: str,
) -> Path:
    """Train trials of a recipe on the same shards; return the file of the best configuration.

    `parallel` of the `trials` train at the same time. The search `name` is continued if it exists.
    """
    recipe, of_file = recipes.read_recipe(recipe)
    values = {**of_file, **overrides}
    name = name or f"tune-{recipe}"
    check_name(name, "name")
    content = storage.read_bytes(space_file) if space_file else ""
    space.parse_space(content, recipe, values, space_file or f"the space of {recipe}")
    folder = Path(output).absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    root = storage.absolute(data_root)
    raw = download(source, root, recipe, values, trains=True)
    assert isinstance(raw, RawData)  # There is no condition.
    study = search.Study(root, name, recipe, values, content, shard(raw).uri, trials, str(folder))
    search.train_trials(study, range(trials), parallel)
    search.finish(study)
    return folder / search.BEST_FILE
