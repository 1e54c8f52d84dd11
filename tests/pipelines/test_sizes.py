"""How much the pods of the heavy steps ask for."""

import pytest

from components.launchers import kubernetes_names
from pipelines import sizes
from trainer.base.errors import ConfigError


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ("sample", "small"),
        ("sample:images=480", "small"),
        ("samples/x.json", "medium"),
        ("coco:s3://bucket/set", "medium"),
        ("voc:/data/VOC2012", "medium"),
        ("https://host/annotations.json", "medium"),
        ("coco:2017", "large"),
        ("coco:2017,base=s3://mirror", "large"),
        ("openimages:", "large"),
        ("openimages:splits=validation", "large"),
    ],
)
def test_a_source_has_a_size(source, size):
    assert sizes.of_source(source) == size


def test_sizes_are_what_kubernetes_takes_and_grow():
    for cpu, memory in sizes.SIZES.values():
        sizes.check(cpu, memory)
    for index in (0, 1):
        amounts = [kubernetes_names.amount(pair[index]) for pair in sizes.SIZES.values()]
        assert amounts == sorted(set(amounts))
    assert sizes.DEFAULT in sizes.SIZES


@pytest.mark.parametrize(
    ("cpu", "memory", "message"),
    [
        ("4 cores", "8Gi", "step_cpu: '4 cores' is not an amount"),
        ("4", "8GB", "step_memory: '8GB' is not an amount"),
        ("0", "8Gi", "step_cpu: '0' is less than 10m"),
        ("4", "8", "step_memory: '8' is less than 64Mi"),
        ("", "8Gi", "step_cpu: '' is less than 10m"),
    ],
)
def test_what_kubernetes_does_not_take_is_refused(cpu, memory, message):
    with pytest.raises(ConfigError) as caught:
        sizes.check(cpu, memory)
    assert message in caught.value.message
