"""Hooks: what optional features may do in a step, and that a step works without them."""

from types import SimpleNamespace

import pytest

from components import environment, hooks, jobs
from components.hooks import Hooks, StepEnd
from operations import notifications


@pytest.fixture
def registered(monkeypatch):
    def register(**features):
        entries = [SimpleNamespace(name=name, load=lambda each=each: each) for name, each in features.items()]
        monkeypatch.setattr(hooks, "entry_points", lambda group: entries)
        hooks._load_hooks.cache_clear()

    yield register
    hooks._load_hooks.cache_clear()


def test_a_step_works_without_any_feature(registered):
    registered()
    hooks.on_step_end(StepEnd("train"))


def test_errors_of_a_feature_are_only_logged(registered, caplog):
    class Ends(Hooks):
        def on_step_end(self, end):
            raise ValueError("https://geheim")

    ended = []
    later = Hooks()
    later.on_step_end = ended.append
    registered(b=later, a=Ends())
    hooks.on_step_end(StepEnd("train"))
    assert ended == [StepEnd("train")]
    assert "ValueError" in caplog.text and "geheim" not in caplog.text


def test_what_is_installed_registers_operations():
    assert "_Operations" in {type(each).__name__ for each in hooks._load_hooks()}


def test_no_job_may_have_the_secrets_of_steps():
    secrets = {environment.SIGNING_NAME, notifications.WEBHOOK_NAME}
    assert secrets == jobs.STEP_SECRETS
