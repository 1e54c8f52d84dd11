"""Detects objects in image files; writes the detections as drawn boxes and as JSON."""

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer import storage
from trainer.base import log
from trainer.base.errors import ConfigError, KubedetError
from trainer.data.images import IMAGE_SUFFIXES
from trainer.data.sources.files import is_hidden
from trainer.export import preannotations
from trainer.export.predict import Detection, ImageTooLarge, Predictor, draw, open_image, to_dict
from trainer.storage import outputs

DETECTIONS = "detections.json"


@dataclass
class PredictedFiles:
    """The detections in image files."""

    model: str  # title of the model
    runtime: str
    folder: str  # folder of the results
    detections: dict[str, list[Detection]] = field(default_factory=dict)  # by image path
    unreadable: dict[str, str] = field(default_factory=dict)  # problem of each unreadable image, by path

    def raise_for_unreadable(self) -> None:
        """Raise ConfigError if an image could not be read."""
        if not self.unreadable:
            return
        lines = "\n".join(f"  {problem}" for problem in self.unreadable.values())
        done = f"the other results are in {self.folder}" if self.detections else "nothing was written"
        total = len(self.detections) + len(self.unreadable)
        raise ConfigError(
            f"{len(self.unreadable)} of {total} images cannot be used:\n{lines}",
            fix=f"{done}; check the paths, and use JPEG, PNG, WebP, BMP, GIF or TIFF files",
        )


def predict_files(
    model: Predictor,
    patterns: Sequence[str],
    output: str,
    *,
    score: float,
    annotations: preannotations.Kind | None = None,
) -> PredictedFiles:
    """Write NAME.jpg with drawn detections and NAME.json for each image, and one detections.json for all.

    Args:
        model: an opened model.
        patterns: image files, folders of images, or patterns such as images/*.jpg.
        output: folder of the results.
        score: minimum score of a detection.
        annotations: kind of annotations to write as well, to be corrected in another tool.
    """
    paths = find_images(patterns)
    names = {path: path.stem for path in paths}
    if len(set(names.values())) < len(paths) or "detections" in names.values():
        names = {path: f"{number:05d}_{path.stem}" for number, path in enumerate(paths)}
    files = [f"{name}{suffix}" for name in names.values() for suffix in (".jpg", ".json")]
    files += preannotations.FILES[annotations] if annotations else ()
    outputs.claim(output, [DETECTIONS, *files], map(str, paths))
    results = PredictedFiles(model.model.title, f"{model.kind} in {model.model.runtime}", output)
    written, images = [], []
    with log.progress("predict", len(paths), "images") as bar:
        for path in paths:
            bar.update()
            try:
                image = open_image(path)
            except KubedetError as error:
                fix = f" ({error.fix})" if isinstance(error, ImageTooLarge) else ""
                results.unreadable[str(path)] = f"{error.message}{fix}"
                continue
            detections = model(image, score)
            written.append({"image": str(path), **to_dict(detections, image)})
            target = Path(output) / names[path]
            with storage.new_file(f"{target}.jpg", sync=False) as file:
                draw(image, detections).save(file, "JPEG", quality=92)
            storage.write_bytes(f"{target}.json", (json.dumps(written[-1], indent=2) + "\n").encode())
            results.detections[str(path)] = detections
            images.append(preannotations.PredictedImage(str(path), *image.size, detections))
    if written:
        text = json.dumps({"model": results.model, "images": written}) + "\n"
        storage.write_bytes(storage.join(output, DETECTIONS), text.encode())
    if annotations and images:
        preannotations.write(annotations, output, results.model, model.model.categories, images)
    return results


def find_images(patterns: Sequence[str]) -> list[Path]:
    """Return the named files, the images in named folders, and the files that match patterns."""
    paths: list[Path] = []
    for text in patterns:
        named = Path(text)
        if glob.has_magic(text) and not named.exists():
            matches = sorted(map(Path, glob.glob(text, recursive=True)))
            if not matches:
                raise ConfigError(f"no file matches the pattern {text}", fix="check it with `ls`")
            paths += [path for path in matches if path.is_file()]
        elif named.is_dir():
            visible = (path for path in named.iterdir() if not is_hidden(path.name))
            inside = sorted(path for path in visible if path.suffix.lower() in IMAGE_SUFFIXES)
            if not inside:
                fix = f"choose a folder with files of these suffixes: {', '.join(IMAGE_SUFFIXES)}"
                raise ConfigError(f"the folder {named} contains no images", fix=fix)
            paths += inside
        else:
            paths.append(named)
    return list(dict.fromkeys(paths))
