"""Public reports about data sets: each situation, and what kubedet answers."""

import pytest
from batches import take

from trainer.base.errors import DataError
from trainer.model.architecture import build

HALF = "0 0.5 0.5 0.5 0.5"


def boxes(dataset):
    """Rounded boxes in pixels, by the size of their images."""
    truth = dataset.annotations()
    sizes = {image["id"]: (image["width"], image["height"]) for image in truth["images"]}
    return [
        (sizes[item["image_id"]], [round(side, 3) for side in item["bbox"]]) for item in truth["annotations"]
    ]


def test_rf_detr_775_a_description_named_data_yml(sets):
    """The documentation allowed data.yml, the check only data.yaml; here any one YAML file is found."""
    sets.yolo("train: images\nnames: [cat]\n", {"images/a.jpg": HALF}, name="data.yml")
    assert boxes(sets.read("yolo", val_fraction=0.0)) == [((40, 30), [10, 7.5, 20, 15])]


@pytest.mark.parametrize("folder", ["val", "valid", "held_out"])
def test_rf_detr_1177_the_description_says_where_val_is(sets, folder):
    """Images for validation were expected in `valid`, whatever the description said."""
    yaml = f"train: train/images\nval: {folder}/images\nnames: [cat]\n"
    sets.yolo(yaml, {"train/images/a.jpg": HALF, f"{folder}/images/b.jpg": "0 0.5 0.5 0.1 0.1"})
    assert boxes(sets.read("yolo", "val")) == [((40, 30), [18, 13.5, 4, 3])]


def test_ultralytics_18454_val_in_a_folder_of_another_name(sets):
    """Is it `val` or `valid`? The message said neither; here it names the folders that are there."""
    yaml = "train: train/images\nval: valid/images\nnames: [cat]\n"
    sets.yolo(yaml, {"train/images/a.jpg": HALF, "val/images/b.jpg": HALF})
    with pytest.raises(DataError) as caught:
        sets.shards("yolo")
    assert "valid/images" in caught.value.message and "train, val" in caught.value.message


def test_ultralytics_25090_a_missing_split_is_no_traceback(kubedet, sets):
    """A description with a path that does not exist ended the validation with FileNotFoundError."""
    sets.yolo("train: images\nval: nowhere\nnames: [cat]\n", {"images/a.jpg": HALF})
    code, _, err = kubedet("data", "inspect", f"yolo:{sets.root}")
    assert code == 2 and "nowhere" in err and "fix: " in err


def test_anomalib_865_hidden_files_are_no_images(sets):
    """Jupyter's `.ipynb_checkpoints` and macOS' `._` files became images, or classes."""
    names = ("a.jpg", ".ipynb_checkpoints/a-checkpoint.jpg", "._a.jpg")
    sets.yolo("train: images\nnames: [cat]\n", {f"images/{name}": HALF for name in names})
    assert len(sets.read("yolo", val_fraction=0.0)) == 1


def test_cocoapi_374_annotations_without_iscrowd_and_area(sets):
    """Evaluations ended with KeyError; here an object is none of a crowd, and as large as its box."""
    sets.coco([("a", 1, [4, 4, 8, 6])], {1: "cat"})
    (annotation,) = sets.read("coco", val_fraction=0.0).annotations()["annotations"]
    assert (annotation["iscrowd"], annotation["area"]) == (0, 48)


def test_rf_detr_1186_images_of_background(sets):
    """Images without objects only count if the file lists them; those that it does not list are not read."""

    def change(form):
        form["images"].append({"id": "b", "file_name": "b.jpg", "width": 40, "height": 30})

    for name in ("b", "not listed"):
        sets.picture(f"train/{name}.jpg")
    sets.coco([("a", 1, [4, 4, 8, 6])], {1: "cat"}, change=change)
    dataset = sets.read("coco", val_fraction=0.0)
    assert len(dataset) == 2 and len(boxes(dataset)) == 1


def test_rf_detr_260_no_test_split_is_needed(sets):
    """A training without a test ended with FileNotFoundError for `test/_annotations.coco.json`."""
    for folder in ("train", "valid"):
        sets.coco([(folder, 1, [4, 4, 8, 6])], {1: "cat"}, split=folder)
        written = sets.root / "annotations" / f"instances_{folder}.json"
        written.rename(sets.root / folder / "_annotations.coco.json")
    assert [len(sets.read("coco", split)) for split in ("train", "val")] == [1, 1]


@pytest.mark.parametrize(
    ("annotated", "scale"),
    [
        pytest.param(1, [1.0, 1.0], id="vision-2144"),  # One of the images is background.
        pytest.param(2, [3.0, 3.0], id="icevision-328"),  # Crops leave no box.
    ],
)
def test_vision_2144_icevision_328_a_batch_without_a_box(sets, tiny, annotated, scale):
    """Training ended with an error of shapes where an image had no box, from the start or after a crop."""

    def change(form):
        del form["annotations"][annotated:]

    sets.coco([(name, 1, [1, 1, 3, 3]) for name in "ab"], {1: "cat"}, change=change)
    config = tiny(loader__scale=scale)
    passes = take(sets.read("coco", val_fraction=0.0), config.loader, 20, global_batch=1, batch_size=1)
    batch = next(batch for batch in passes if batch.counts == [0])
    detector = build(config.model, 1)
    losses = detector(batch.images, batch.boxes, batch.labels)
    sum(losses.values()).backward()
    gradients = [value.grad for value in detector.parameters() if value.grad is not None]
    assert losses["boxes"] == 0 and gradients and all(value.isfinite().all() for value in gradients)


def test_vision_2240_boxes_without_area(sets):
    """Boxes with negative sides or without area made the loss NaN; here none of them reaches a training."""
    bad = [[4, 4, 0, 8], [4, 4, 8, 0], [20, 20, -8, 5]]
    sets.coco([("a", 1, [4, 4, 8, 8]), *(("a", 1, bbox) for bbox in bad)], {1: "cat"})
    assert boxes(sets.read("coco", val_fraction=0.0, box_format="xywh")) == [((40, 30), [4, 4, 8, 8])]


def test_cvat_7523_names_that_differ_in_the_extension_only(sets, caplog):
    """Such images got one image id in an export to COCO, and one label file in one to YOLO: each is named."""
    names = [f"images/a.{end}" for end in ("jpg", "png")]
    sets.yolo("train: images\nnames: [cat]\n", dict.fromkeys(names, HALF))
    assert len(boxes(sets.read("yolo", val_fraction=0.0))) == 2
    assert "label file of two images: 1 (first: images/a.jpg, images/a.png)" in caplog.text

    def change(form):
        form["images"].append({**form["images"][0], "file_name": "a.png"})

    sets.picture("train/a.png")
    sets.coco([("a", 1, [4, 4, 8, 8])], {1: "cat"}, change=change)
    with pytest.raises(DataError) as caught:
        sets.shards("coco", val_fraction=0.0)
    assert all(name in caught.value.message for name in ("id of two images", "a.jpg", "a.png"))


@pytest.mark.parametrize(
    ("annotated", "box"),
    [((30, 40), [4, 5, 10, 20]), ((40, 30), [5, 4, 20, 10])],  # As displayed, and as stored.
)
def test_labelme_1529_an_image_that_exif_turns(sets, annotated, box):
    """Labels missed the objects in an image with an orientation; here the annotated size decides."""

    def change(form):
        form["images"][0]["width"], form["images"][0]["height"] = annotated

    sets.coco([("a", 1, [4, 5, 10, 20])], {1: "cat"}, change=change)
    sets.picture("train/a.jpg", orientation=6)
    assert boxes(sets.read("coco", val_fraction=0.0)) == [((30, 40), box)]


def test_label_studio_7294_file_names_that_leave_the_export(sets):
    """An export named its images by paths of the server, outside of its folder; that is refused by name."""
    name = "..\\..\\label-studio\\media\\upload\\4\\a.jpg"
    sets.coco(
        [("a", 1, [4, 4, 8, 8])], {1: "cat"}, change=lambda form: form["images"][0].update(file_name=name)
    )
    with pytest.raises(DataError) as caught:
        sets.shards("coco")
    assert repr(name) in caught.value.message and "file_name" in caught.value.fix
