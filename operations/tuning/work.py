"""The work of a search's steps in Kubeflow: a trial in each pod, and the best of all."""

from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from components import usage
from operations.tuning import search, space, study_folder, study_name
from operations.tuning.study import Search, Study, Trial
from trainer import storage
from trainer.config.types import Overrides
from trainer.model import recipes


class Request(NamedTuple):
    """What is searched."""

    data: dict[str, Any]
    """Manifest of the shards."""
    name: str
    recipe: str
    overrides: Overrides
    space: str
    data_root: str
    trials: int

    def open(self) -> tuple[Study, str]:
        """Return the study and its name."""
        name, config = study_name(self.name, self.recipe), recipes.load(self.recipe, self.overrides)
        overrides = {  # Kubeflow makes 4.0 of 4, and people read the file.
            key: attrgetter(key)(config) if isinstance(value, float) else value
            for key, value in self.overrides.items()
        }
        given = space.parse(self.space, self.recipe, overrides, "the space")
        searched = Search(self.recipe, overrides, given, self.data["uri"])
        return Study(study_folder(self.data_root, name), searched, self.trials), name


def train(searched: tuple[Any, ...], number: str, gpus: int) -> str:
    """Train a trial of a search in a pod with `gpus` GPUs; return a line about it.

    `searched` has the fields of a `Request`.

    Raises:
        ConfigError: the space cannot be used, or the name has a study of something else.
        Interrupted: stopped by a signal; the same call continues.
        StorageError: the data root cannot be reached.
    """
    request = Request(*searched)
    study, name = request.open()
    usage.keep(request.data_root, processes=gpus)

    def start(trial: Trial, stack: ExitStack) -> search.LocalTraining:
        folder = storage.join(study.uri, "runs", f"{trial.number:05d}")
        return search.LocalTraining(study.search, trial, folder, stack, processes=max(gpus, 1))

    search.train(study, [int(number)], 1, start)
    search.publish(study, name)
    return next(str(trial) for trial in study.trials() if trial.number == int(number))


def choose(searched: tuple[Any, ...], ended: list[str], paths: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Write the page and the best configuration of a search, also into two local files, `paths`.

    Returns:
        The artifact's `metrics`, and what is `shown` with the configuration.

    Raises:
        TrainingError: no trial came to a result.
    """
    request = Request(*searched)
    study, name = request.open()
    usage.keep(request.data_root)
    print("\n".join(ended), flush=True)
    best = search.finish(study, name)
    page, configuration = (storage.join(study.uri, file) for file in (search.PAGE, search.BEST))
    for path, uri in zip(paths, (page, configuration), strict=True):
        Path(path).write_bytes(storage.read_bytes(uri))
    print(f"best: {best}\npage: {page}")
    metrics = {search.metric_of(study.search): best.value, "trial": best.number}
    return {"metrics": metrics, "shown": {"uri": configuration}}
