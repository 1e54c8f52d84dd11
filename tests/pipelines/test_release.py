"""What follows from the version that Kubeflow Pipelines says it is."""

import pytest

from pipelines.release import TESTED, Release
from trainer.base.errors import ConfigError


@pytest.mark.parametrize("tag", ["2.14.3", "2.14.0-rc.1", "v2.5.0", "2.0.0", "1.8.22", "2.14"])
def test_what_refuses_the_pipeline_is_refused(tag):
    with pytest.raises(ConfigError, match=f"Kubeflow Pipelines is {tag} there") as caught:
        Release(tag).refuse()
    assert TESTED in caught.value.fix


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        (TESTED, ""),
        (f"v{TESTED}", ""),
        (f"{TESTED}-rc.1", f"is {TESTED}-rc.1; this was tried on {TESTED} alone"),
        ("2.16.0", "is 2.16.0; this was tried on"),
        ("2.18.1", "is 2.18.1; this was tried on"),
        ("3.0.0", "is 3.0.0; this was tried on"),
        ("unknown", "version not known (it says 'unknown')"),
        ("master", "version not known (it says 'master')"),
        ("", "version not known (it says nothing)"),
    ],
)
def test_what_was_not_tried_is_told_and_taken(tag, message):
    release = Release(tag)
    release.refuse()
    assert release.remark().startswith(message) and bool(release.remark()) is bool(message)


@pytest.mark.parametrize(
    ("tag", "orphans"), [("2.15.2", False), ("2.16.0", True), ("2.17.0", True), ("3.0", True), ("", False)]
)
def test_which_ones_let_runs_outlive_their_schedule(tag, orphans):
    assert Release(tag).orphans is orphans
