"""Whatever a YAML file holds, each of its readers takes it or ends with a message and a remedy."""

from pathlib import Path

import pytest
from hostile import odd_yaml

from components.launchers import job_options
from operations.tuning import space as spaces
from trainer.base.errors import KubedetError
from trainer.data.sources import yolo
from trainer.model import recipes

PLACES = (
    "{}", "{}: 1", "- {}", "train.lr: {}", "recipe: {}", "nodes: {}", "labels: {}",
    "recipe: debug\nset: {}", "recipe: debug\nset:\n  train.lr: {}",
    "recipe: debug\nset:\n  data.allow_hosts: {}", "train.lr: {{low: {}, high: 1}}",
    "train.lr: {{choices: [{}]}}", "train.optimizer: {{choices: [{}]}}", "train: .\nnames: {}",
    "names: [a]\ntrain: {}", "names: {{0: {}}}\ntrain: .", "names: [a]\npath: {}\ntrain: .",
)  # fmt: skip


def of_space(path):
    space = spaces.parse_space(Path(path).read_bytes() or "{}", "debug", {}, path)
    assert spaces.parse_space(spaces.format_space(space, one_line=True), "debug", {}, path) == space


READERS = {
    "space": of_space,
    "recipe": recipes.read_recipe,
    "job": job_options._read_file,
    "yolo": lambda path: yolo.YoloSource(path.removesuffix("/data.yaml")).read_description(),
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_values_of_all_kinds(reader, tmp_path):
    path = tmp_path / "data.yaml"
    for place in PLACES:
        for value in odd_yaml:
            path.write_bytes(place.format(value).encode("utf-8", "surrogatepass"))
            try:
                READERS[reader](str(path))
            except KubedetError as error:
                assert error.message and error.fix, (place, value)
            except BaseException as error:
                raise AssertionError(f"{place.format(value)!r} ended in {error!r}") from error
