"""What a search has found: its page, and the best configuration as a file."""

from components.tuning.study import Search, Study, TrialRecord
from trainer import storage
from trainer.model import recipes
from trainer.report.tuning_page import TrialShown, page

PAGE, BEST = "tuning.html", "best.yaml"
"""Files beside the study."""


def metric_of(search: Search) -> str:
    """Return the metric that a search makes larger."""
    return recipes.load(search.recipe, dict(search.overrides)).evaluation.metric


def recipe_file(search: Search, best: TrialRecord) -> str:
    """Return the best trial's configuration as a file that `--recipe` takes."""
    return recipes.file_text(search.recipe, {**search.overrides, **best.params})


def publish(study: Study, name: str, *folders: str) -> None:
    """Write the page, and the best configuration where there is one, beside the study and elsewhere.

    Args:
        study: of the search.
        name: of the search.
        folders: further places.
    """
    best = study.best()
    text = recipe_file(study.search, best) if best else ""
    trials = [
        TrialShown(record.number, record.state, record.value, record.validations, record.params)
        for record in study.records
    ]
    html = page(name, metric_of(study.search), trials, study.importances(), text)
    for place in (study.uri, *folders):
        storage.write_bytes(storage.join(place, PAGE), html.encode())
        if text:
            storage.write_bytes(storage.join(place, BEST), text.encode())
