"""The sizes behind the decision for DDP: what sharding the state over processes could save at most."""

import pytest

from benchmarks.state import ACTIVATIONS_MB, sizes


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "classes", "moments"), [("openimages_r50", 600, 1), ("mlperf", 264, 2)])
def test_the_whole_state_is_smaller_than_one_images_activations(recipe, classes, moments):
    figures = sizes(recipe, classes)
    parts = ("parameters", "gradients", "optimizer", "average")
    assert figures["all"] == pytest.approx(sum(figures[part] for part in parts), abs=0.1)
    assert figures["optimizer"] == pytest.approx(moments * figures["gradients"], abs=0.2)
    assert figures["gradients"] == pytest.approx(figures["parameters"], rel=0.01)
    assert figures["all"] < ACTIVATIONS_MB
