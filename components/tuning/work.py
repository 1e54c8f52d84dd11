"""The work of the steps of a search in a cluster: a trial in each pod, and the best of all."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from components import tuning, usage
from components.tuning import results, search, spaces
from components.tuning.study import Search, Study, TrialRecord
from trainer import storage
from trainer.model import recipes

Request = tuple[dict[str, Any], str, str, dict[str, Any], str, str, int]
"""Manifest of the shards, name of the search, recipe, overrides, space, data root, number of trials."""


def train(request: Request, number: str, gpus: int) -> str:
    """Train a trial of a search; return a line about it.

    Args:
        request: what is searched.
        number: of the trial.
        gpus: of this pod.

    Raises:
        ConfigError: the space cannot be used, or the name has a study of something else.
        Interrupted: stopped by a signal; the same call goes on.
        StorageError: the data root cannot be reached.
    """
    study, name = _opened(request)
    usage.keep(request[5], processes=gpus)

    def start(record: TrialRecord, stack: ExitStack) -> search.LocalTraining:
        folder = storage.join(study.uri, "runs", f"{record.number:05d}")
        return search.LocalTraining(study.search, record, folder, stack, processes=max(gpus, 1))

    search.train(study, [int(number)], 1, start)
    study.read()
    results.publish(study, name)
    (record,) = (record for record in study.records if record.number == int(number))
    return search.describe(record)


def choose(request: Request, ended: list[str], paths: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Write the page and the best configuration of a search.

    Args:
        request: what is searched.
        ended: a line about each trial.
        paths: local files that receive page and configuration, as the study's folder does.

    Returns:
        The artifact's `metrics`, and what is `shown` with the configuration.

    Raises:
        TrainingError: no trial came to a result.
    """
    study, name = _opened(request)
    usage.keep(request[5])
    print("\n".join(ended), flush=True)
    results.publish(study, name)
    trial = search.best(study)
    page, text = (storage.read_bytes(storage.join(study.uri, file)) for file in (results.PAGE, results.BEST))
    for path, content in zip(paths, (page, text), strict=True):
        Path(path).write_bytes(content)
    print(f"best: {search.describe(trial)}\npage: {storage.join(study.uri, results.PAGE)}")
    metrics = {results.metric_of(study.search): trial.value, "trial": trial.number}
    return {"metrics": metrics, "shown": {"uri": storage.join(study.uri, results.BEST)}}


def _opened(request: Request) -> tuple[Study, str]:
    """Return the study and its name."""
    data, name, recipe, overrides, text, data_root, trials = request
    name, overrides = tuning.study_name(name, recipe), _typed(recipe, overrides)
    space = spaces.of(text, recipe, overrides, "of the run")
    searched = Search(recipe, overrides, space, data["uri"])
    return Study(tuning.study_folder(data_root, name), searched, trials), name


def _typed(recipe: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return whole numbers as such: Kubeflow makes 4.0 of 4, and people read the file that is written."""
    config = recipes.load(recipe, overrides)

    def typed(key: str, value: Any) -> Any:
        section, _, name = key.partition(".")
        known = getattr(getattr(config, section), name, value)
        return int(value) if isinstance(value, float) and isinstance(known, int) else value

    return {key: typed(key, value) for key, value in overrides.items()}
