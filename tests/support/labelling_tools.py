"""Writes one small data set with the exporters of other programs, each in that program's own environment.

    python labelling_tools.py supervision-yolo FOLDER

The tests call it with the interpreter of an environment in which the program is installed.
"""

import json
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

SIZE = (64, 48)
CLASSES = ["cat", "dog"]
TRUTH = {
    "train": {
        "a.jpg": [("cat", (5, 6, 20, 15)), ("dog", (30, 10, 12, 30))],
        "b.jpg": [("dog", (1, 2, 60, 40))],
    },
    "val": {
        "c.jpg": [("cat", (10, 10, 8, 8))],
        "d.jpg": [("cat", (2, 3, 4, 5)), ("cat", (40, 8, 16, 32))],
    },
}
"""Boxes (x, y, width, height in pixels) of each image of each split."""


def shares(box: tuple[int, int, int, int]) -> list[float]:
    x, y, w, h = box
    return [x / SIZE[0], y / SIZE[1], w / SIZE[0], h / SIZE[1]]


def write_images(folder: Path) -> None:
    from PIL import Image

    for number, (split, images) in enumerate(TRUTH.items()):
        (folder / split).mkdir(parents=True)
        for place, name in enumerate(images):
            color = (40 * place, 60 + 90 * number, 200)
            Image.new("RGB", SIZE, color).save(folder / split / name)


def supervision(form: str, folder: Path) -> None:
    """Roboflow's library: YOLO, COCO and VOC, each split in a folder as its exports have it."""
    import numpy as np
    import supervision as sv

    pictures = folder.parent / "pictures"
    write_images(pictures)
    for split, images in TRUTH.items():
        detections = {
            str(pictures / split / name): sv.Detections(
                np.array([[x, y, x + w, y + h] for _, (x, y, w, h) in boxes], float),
                class_id=np.array([CLASSES.index(label) for label, _ in boxes]),
            )
            for name, boxes in images.items()
        }
        made = sv.DetectionDataset(CLASSES, list(detections), detections)
        place = folder / {"train": "train", "val": "valid"}[split]
        if form == "yolo":
            made.as_yolo(str(place / "images"), str(place / "labels"), str(folder / "data.yaml"))
        elif form == "coco":
            made.as_coco(str(place), str(place / "_annotations.coco.json"))
        else:
            made.as_pascal_voc(str(place), str(place))
    if form == "yolo":
        # As Roboflow's export has it: the library's own file names the classes alone.
        text = (folder / "data.yaml").read_text()
        (folder / "data.yaml").write_text(f"train: ../train/images\nval: ../valid/images\n{text}")


def label_studio(form: str, folder: Path) -> None:
    """Label Studio's converter, from its own tasks: images that it fetches, or reads where they are."""
    from label_studio_sdk.converter import Converter

    config = (
        '<View><Image name="image" value="$image"/><RectangleLabels name="label" toName="image">'
        '<Label value="cat"/><Label value="dog"/></RectangleLabels></View>'
    )
    pictures = folder.parent / "pictures"
    write_images(pictures)
    handler = partial(SimpleHTTPRequestHandler, directory=str(pictures))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    root = pictures.absolute() if form.endswith("local") else f"http://127.0.0.1:{server.server_port}"
    tasks = []
    for split, images in TRUTH.items():
        for name, boxes in images.items():
            result = [_rectangle(number, label, box) for number, (label, box) in enumerate(boxes)]
            annotation = {"id": len(tasks) + 1, "result": result, "was_cancelled": False}
            tasks.append(
                {
                    "id": len(tasks) + 1,
                    "data": {"image": f"{root}/{split}/{name}"},
                    "annotations": [annotation],
                }
            )
    source = folder.parent / "tasks.json"
    source.write_text(json.dumps(tasks))
    converter = Converter(config, str(folder.parent), download_resources=True)
    convert = {"yolo": converter.convert_to_yolo, "voc": converter.convert_to_voc}
    convert.get(form, converter.convert_to_coco)(str(source), str(folder), is_dir=False)


def _rectangle(number: int, label: str, box: tuple[int, int, int, int]) -> dict:
    x, y, w, h = box
    value = {
        "x": 100 * x / SIZE[0],
        "y": 100 * y / SIZE[1],
        "width": 100 * w / SIZE[0],
        "height": 100 * h / SIZE[1],
    }
    return {
        "id": f"r{number}",
        "type": "rectanglelabels",
        "from_name": "label",
        "to_name": "image",
        "original_width": SIZE[0],
        "original_height": SIZE[1],
        "image_rotation": 0,
        "value": value | {"rotation": 0, "rectanglelabels": [label]},
    }


def datumaro(form: str, folder: Path) -> None:
    """CVAT's exporters are Datumaro's: COCO, VOC, YOLO of Darknet and of Ultralytics."""
    import datumaro as dm

    pictures = folder.parent / "pictures"
    write_images(pictures)
    items = [
        dm.DatasetItem(
            id=Path(name).stem,
            subset=split,
            media=dm.Image.from_file(path=str(pictures / split / name)),
            annotations=[
                dm.Bbox(*box, label=CLASSES.index(label), id=number, group=number)
                for number, (label, box) in enumerate(boxes, 1)
            ],
        )
        for split, images in TRUTH.items()
        for name, boxes in images.items()
    ]
    made = dm.Dataset.from_iterable(items, categories=CLASSES)
    made.export(str(folder), form.replace("-", "_"), save_media=True)


def fiftyone(form: str, folder: Path) -> None:
    """FiftyOne's exporters, which need no database."""
    import fiftyone as fo
    import fiftyone.utils.coco
    import fiftyone.utils.voc
    import fiftyone.utils.yolo

    pictures = folder.parent / "pictures"
    write_images(pictures)
    for split, images in TRUTH.items():
        if form == "yolo":
            exporter = fo.utils.yolo.YOLOv5DatasetExporter(
                export_dir=str(folder), split=split, classes=CLASSES
            )
        elif form == "coco":
            exporter = fo.utils.coco.COCODetectionDatasetExporter(
                export_dir=str(folder / split), classes=CLASSES
            )
        else:
            exporter = fo.utils.voc.VOCDetectionDatasetExporter(export_dir=str(folder / split))
        with exporter:
            for name, boxes in images.items():
                path = str(pictures / split / name)
                detections = [
                    fo.Detection(
                        label=label, bounding_box=[x / SIZE[0], y / SIZE[1], w / SIZE[0], h / SIZE[1]]
                    )
                    for label, (x, y, w, h) in boxes
                ]
                metadata = fo.ImageMetadata(width=SIZE[0], height=SIZE[1], num_channels=3)
                exporter.export_sample(path, fo.Detections(detections=detections), metadata=metadata)


def labelimg(form: str, folder: Path) -> None:
    """LabelImg's writers: a file beside each image."""
    write_images(folder)
    for split, images in TRUTH.items():
        for name, boxes in images.items():
            image = folder / split / name
            size = (SIZE[1], SIZE[0], 3)
            if form == "voc":
                from libs.pascal_voc_io import PascalVocWriter as Writer
            else:
                from libs.yolo_io import YOLOWriter as Writer
            writer = Writer(split, name, size, local_img_path=str(image))
            for label, (x, y, w, h) in boxes:
                writer.add_bnd_box(x, y, x + w, y + h, label, 0)
            if form == "voc":
                writer.save(str(image.with_suffix(".xml")))
            else:
                writer.save(list(CLASSES), str(image.with_suffix(".txt")))


TOOLS = {
    "supervision": supervision,
    "label-studio-sdk": label_studio,
    "datumaro": datumaro,
    "fiftyone": fiftyone,
    "labelImg": labelimg,
}
"""What writes a form into a folder, by the package that it needs."""

if __name__ == "__main__":
    TOOLS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
