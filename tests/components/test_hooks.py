"""Hooks: what optional features may do in a step, and that a step works without them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from components import environment, hooks, jobs
from components.hooks import Hooks, Listing, NothingNew, StepEnd
from operations import notifications
from trainer.base.errors import ConfigError
from trainer.model import recipes


@pytest.fixture
def registered(monkeypatch):
    def register(**features):
        entries = [SimpleNamespace(name=name, load=lambda each=each: each) for name, each in features.items()]
        monkeypatch.setattr(hooks, "entry_points", lambda group: entries)
        hooks._registered.cache_clear()

    yield register
    hooks._registered.cache_clear()


LISTING = Listing({}, "root", recipes.load("debug"), 0)


def test_a_step_works_without_any_feature(registered):
    registered()
    assert hooks.before_training(LISTING) is None
    hooks.at_end(StepEnd("train"))


def test_a_condition_that_no_feature_decides_on_is_refused(registered):
    registered()
    with pytest.raises(ConfigError, match="--min-new-images"):
        hooks.before_training(replace(LISTING, min_new_images=1))


def test_a_feature_overrides_what_it_needs_and_what_fails_at_the_end_is_logged(registered, caplog):
    class Ends(Hooks):
        def before_training(self, listing):
            return NothingNew("pets v3", "0 new")

        def at_end(self, end):
            raise ValueError("https://geheim")

    ended = []
    later = Hooks()
    later.at_end = ended.append
    registered(b=later, a=Ends())
    assert hooks.before_training(LISTING) == NothingNew("pets v3", "0 new")
    hooks.at_end(StepEnd("train"))
    assert ended == [StepEnd("train")]
    assert "ValueError" in caplog.text and "geheim" not in caplog.text


def test_what_is_installed_registers_operations():
    assert "_Operations" in {type(each).__name__ for each in hooks._registered()}


def test_no_job_may_have_the_secrets_of_steps():
    secrets = {environment.SIGNING_NAME, notifications.NOTIFY}
    assert secrets == jobs.OF_STEPS
