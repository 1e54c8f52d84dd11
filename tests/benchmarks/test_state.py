"""The sizes behind the decision for DDP: what sharding the state over processes could save at most."""

import pytest

from benchmarks.state import ACTIVATIONS_MB, sizes


@pytest.mark.parametrize(("recipe", "classes", "moments"), [("openimages_r50", 600, 1), ("mlperf", 264, 2)])
def test_the_whole_state_is_smaller_than_one_images_activations(recipe, classes, moments):
    found = sizes(recipe, classes)
    parts = ("parameters", "gradients", "optimizer", "average")
    assert found["all"] == pytest.approx(sum(found[part] for part in parts), abs=0.1)
    assert found["optimizer"] == pytest.approx(moments * found["gradients"], abs=0.2)
    assert found["gradients"] == pytest.approx(found["parameters"], rel=0.01)
    assert found["all"] < ACTIVATIONS_MB
