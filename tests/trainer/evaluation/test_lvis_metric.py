"""The metrics of LVIS equal those of the package lvis 0.5.3 to 1e-9.

lvis.json has its results (`LVISEval(LVIS(gt), LVISResults(gt, dt), "bbox")`, with `numpy.float = float`) for
the inputs that `case` draws. RandomState draws the same numbers in every version of NumPy.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainer.config.schema import EvaluationConfig
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import place, shard
from trainer.evaluation import lvis_metric, scored_files
from trainer.evaluation.metrics import LVIS
from trainer.evaluation.truth_and_predictions import Predictions, Truth

FIGURES = json.loads((Path(__file__).parent / "lvis.json").read_text())
EDGES = ("plain", "areas", "unusual lists", "ties", "more than 300", "empty boxes", "the same", "one object")


def case(edge, seed):
    """Ground truth and detections in COCO's form, with images annotated as LVIS's."""
    draw = np.random.RandomState(100 * EDGES.index(edge) + seed)
    classes, images = (1, 6, 20)[seed % 3], (1, 4, 9)[seed % 3]
    ids = [3 * number + 1 for number in range(classes)]
    truth = {"images": [], "annotations": [], "categories": []}
    for number, one in enumerate(ids):
        truth["categories"].append({"id": one, "name": f"c{one}", "frequency": "rcf"[number % 3]})
    found = []

    def detect(image, label, box):
        chance = round(draw.rand(), 1 if edge in ("ties", "more than 300") else 4)
        found.append({"image_id": image, "category_id": label, "bbox": box, "score": chance})

    for image in range(10, 10 + 7 * images, 7):
        present = set()
        for _ in range(draw.randint(1, 9)):
            label = ids[draw.randint(classes)]
            present.add(label)
            box = [*draw.uniform(0, 300, 2), *10 ** draw.uniform(0.8, 2.3, 2)]
            area = box[2] * box[3] * draw.uniform(0.4, 1)
            if edge == "areas" and draw.rand() < 0.4:
                area = (0.0, 1024.0, 9216.0)[draw.randint(3)]
            item = {"id": len(truth["annotations"]) + 1, "image_id": image, "category_id": label}
            truth["annotations"].append({**item, "bbox": box, "area": area})
            for _ in range(draw.randint(0, 4)):
                moved = (np.array(box) * draw.uniform(0.85, 1.15, 4)).tolist()
                detect(image, label if draw.rand() < 0.85 else ids[draw.randint(classes)], moved)
            if edge == "the same":
                found += [{"image_id": image, "category_id": label, "bbox": box, "score": 0.5}] * 3
        rest = [label for label in ids if label not in present]
        absent = [label for label in rest if draw.rand() < 0.4]
        partly = [label for label in sorted(present) if draw.rand() < 0.4]
        if edge == "unusual lists":
            partly += [label for label in rest if draw.rand() < 0.5]
            absent += [label for label in sorted(present) if draw.rand() < 0.3]
        lists = {"neg_category_ids": absent, "not_exhaustive_category_ids": partly}
        truth["images"].append({"id": image, "width": 1000, "height": 1000, **lists})
        for _ in range(draw.randint(300, 500) if edge == "more than 300" else draw.randint(1, 12)):
            box = [*draw.uniform(0, 300, 2), *10 ** draw.uniform(0.5, 2.3, 2)]
            detect(image, ids[draw.randint(classes)], box)
        if edge == "empty boxes":
            found[-1]["bbox"][2] = 0.0
    if edge == "one object":
        del truth["annotations"][1:]
    draw.shuffle(found)
    return truth, found


@pytest.mark.parametrize("edge", EDGES)
def test_figures_are_those_of_the_lvis_package(edge):
    for seed, expected in enumerate(FIGURES[edge]):
        truth, found = case(edge, seed)
        ours = lvis_metric.evaluate(Truth.from_coco(truth), Predictions.from_coco(found))
        assert list(ours) == list(LVIS)
        assert list(ours.values()) == pytest.approx(expected, abs=1e-9), seed


def test_no_detections_and_other_ground_truth():
    truth, _ = case("plain", 1)
    nothing = lvis_metric.evaluate(Truth.from_coco(truth), Predictions.from_coco([]))
    assert set(nothing.values()) <= {0.0, -1.0} and nothing["lvis/AP"] == 0
    del truth["images"][0]["neg_category_ids"]
    assert lvis_metric.evaluate(Truth.from_coco(truth), Predictions.from_coco([])) == {}


@pytest.mark.slow
def test_files_are_scored_with_rules_and_a_table(tmp_path):
    truth, found = case("plain", 1)
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    (tmp_path / "found.json").write_text(json.dumps(found))
    files = (str(tmp_path / name) for name in ("truth.json", "found.json", "out"))
    summary = scored_files.evaluate(
        *files, EvaluationConfig(bootstrap=2), rules=["lvis/APr >= 0.99"], clip=True
    )
    expected = dict(zip(LVIS, FIGURES["plain"][1], strict=True))
    assert {name: summary["metrics"][name] for name in LVIS} == pytest.approx(expected, abs=0.02)  # Clipped.
    assert not summary["verdict"]["passed"] and "lvis/APr" in summary["verdict"]["reason"]
    assert "lvis/APf" in (tmp_path / "out" / "table.txt").read_text()


def test_shards_keep_what_people_looked_for(tmp_path, tiny):
    """From a source in LVIS's form to the ground truth, by label, and to the negatives of the training."""
    config = tiny(data__processes=1, data__val_fraction=0.5).data
    categories = [{"id": 5, "name": "cat", "frequency": "r"}, {"id": 2, "name": "dog", "frequency": "f"}]
    categories += [{"id": 9, "name": "cow", "frequency": "c"}, {"id": 7, "name": "pig", "frequency": "c"}]
    form = {"images": [], "annotations": [], "categories": categories}
    (tmp_path / "images").mkdir()
    for number in range(1, 9):
        noise = np.random.RandomState(number).randint(0, 256, (60, 80, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "images" / f"{number}.jpg")
        lists = {"neg_category_ids": [7], "not_exhaustive_category_ids": [5]}
        form["images"].append(
            {"id": number, "file_name": f"{number}.jpg", "width": 80, "height": 60, **lists}
        )
        for label in (5, 2):
            item = {"id": len(form["annotations"]) + 1, "image_id": number, "category_id": label}
            form["annotations"].append({**item, "bbox": [5, 5, 30, 30], "area": 900, "iscrowd": 0})
    source = tmp_path / "annotations.json"
    source.write_text(json.dumps(form))
    raw = download(f"coco:{source}", str(tmp_path), config)
    index = shard(raw, str(tmp_path), config)
    dataset = ShardDataset(index.uri, "val")
    truth = dataset.annotations()
    names = [category["name"] for category in truth["categories"]]
    assert names == ["dog", "cat", "pig", "cow"]  # By their ids: the labels.
    assert [category["frequency"] for category in truth["categories"]] == ["f", "r", "c", "c"]
    assert {tuple(image["neg_category_ids"]) for image in truth["images"]} == {(2,)}
    assert {tuple(image["not_exhaustive_category_ids"]) for image in truth["images"]} == {(1,)}
    # Dogs are all boxed and pigs are absent; there may be more cats, and nobody looked for cows.
    assert dataset.names.negatives(dataset.read(0)[1]) == [0, 2]
    perfect = Predictions.from_coco([{**item, "score": 0.9} for item in truth["annotations"]])
    scores = lvis_metric.evaluate(Truth.from_coco(truth), perfect)
    assert [scores[f"lvis/AP{group}"] for group in ("", "r", "c", "f")] == [1, 1, -1, 1]
    # Without the lists it is other data.
    for image in form["images"]:
        del image["neg_category_ids"], image["not_exhaustive_category_ids"]
    source.write_text(json.dumps(form))
    plain = download(f"coco:{source}", str(tmp_path), config)
    assert place(plain, str(tmp_path), config) != index.uri
