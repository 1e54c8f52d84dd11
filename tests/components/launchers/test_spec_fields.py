"""What options and forms say of a job's fields is what the specification says."""

import pytest

from components.launchers import spec_fields


@pytest.mark.parametrize(
    ("name", "label", "meaning", "default", "number"),
    [
        ("nproc", "Processes", "processes on each node; 0 is one for each GPU, or one", 0, True),
        ("gpus", "GPUs", "GPUs of each node", 0, True),
        ("nodes", "Nodes", "machines that train, each a pod", 1, True),
        ("image", "Image", "container image; only a launcher that starts containers needs it", "", False),
    ],
)
def test_a_field(name, label, meaning, default, number):
    assert (spec_fields.label(name), spec_fields.meaning(name)) == (label, meaning)
    assert spec_fields.default(name) == default and spec_fields.is_number(name) is number
