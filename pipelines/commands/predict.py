"""`kubedet predict` and `kubedet serve`: see what an exported model finds in images, or in a browser."""

import argparse
import glob
import json
import os
from pathlib import Path

from pipelines.commands import Commands, option, show
from pipelines.commands.options import TILE, add_inference, add_model, checked_pixel_limit
from trainer.base.errors import ConfigError, KubedetError


def add(commands: Commands) -> None:
    """Declare `kubedet predict`."""
    parser = commands.add_parser(
        "predict",
        description="Detect objects with an exported model or a checkpoint (RUN/train/best.pt). For every "
        "image NAME the folder gets NAME.jpg with drawn detections and NAME.json, and detections.json has "
        "all.",
    )
    add_model(parser)
    text = "image files, folders of images, or patterns such as 'images/*.jpg'"
    parser.add_argument("images", nargs="+", metavar="IMAGES", help=text)
    option(parser, "-o --output DIR", "folder for the results", required=True)
    option(parser, "--score S", "least score", 0.3)
    option(parser, "--tile SIDE", TILE, -1)
    add_inference(parser)
    parser.set_defaults(command=_predict)


def _predict(options: argparse.Namespace) -> int:
    from trainer import storage
    from trainer.export.predict import ImageTooLarge, as_json, draw, open_image, open_model
    from trainer.storage import outputs

    if not 0 <= options.score <= 1:
        raise ConfigError(f"--score must be from 0 to 1, not {options.score:g}", fix="use --score 0.3")
    most_pixels = checked_pixel_limit(options)
    paths = _images(options.images)
    names = {path: path.stem for path in paths}
    if len(set(names.values())) < len(paths) or "detections" in names.values():
        names = {path: f"{number:05d}_{path.stem}" for number, path in enumerate(paths)}
    everything, failed = {}, []
    model = open_model(options.model, options.data_root, options.kind, tile=options.tile)
    files = [f"{name}{suffix}" for name in names.values() for suffix in (".jpg", ".json")]
    outputs.claim(options.output, ["detections.json", *files], map(str, paths))
    title = model.model.title
    show(f"{title}, {model.kind} in {model.model.runtime}")
    for path in paths:
        try:
            image = open_image(path, most_pixels)
        except KubedetError as error:
            fix = f" ({error.fix})" if isinstance(error, ImageTooLarge) else ""
            failed.append(f"  {error.message}{fix}")
            continue
        detections = model(image, options.score)
        result = {"image": str(path), **as_json(detections, image)}
        target = Path(options.output) / names[path]
        with storage.new_file(f"{target}.jpg", sync=False) as file:
            draw(image, detections).save(file, "JPEG", quality=92)
        storage.write_bytes(f"{target}.json", (json.dumps(result, indent=2) + "\n").encode())
        everything[str(path)] = result
        found = [detection.name for detection in detections]
        counts = [f"{found.count(name)} {name}" for name in dict.fromkeys(found)]
        show(f"{path}: {', '.join(counts) or 'nothing found'}")
    if everything:
        whole = json.dumps({"model": title, "images": list(everything.values())})
        storage.write_bytes(os.path.join(options.output, "detections.json"), (whole + "\n").encode())
    if failed:
        lines = "\n".join(failed)
        where = f"the results of the others are in {options.output}" if everything else "nothing was written"
        raise ConfigError(
            f"{len(failed)} of {len(paths)} images cannot be used:\n{lines}",
            fix=f"{where}; check the paths, and use JPEG, PNG, WebP, BMP, GIF or TIFF files",
        )
    print(f"results in {options.output}")
    return 0


def _images(patterns: list[str]) -> list[Path]:
    """Return the named files, the images of folders, and the matches of patterns."""
    from trainer.data.images import IMAGE_SUFFIXES
    from trainer.data.sources.files import is_hidden

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
                suffixes = ", ".join(IMAGE_SUFFIXES)
                raise ConfigError(f"the folder {named} contains no images", fix=f"looked for {suffixes}")
            paths += inside
        else:
            paths.append(named)
    return list(dict.fromkeys(paths))


def add_serve(commands: Commands) -> None:
    """Declare `kubedet serve`."""
    parser = commands.add_parser(
        "serve",
        description="Serve one model on this machine: a page that shows the detections in an image dropped "
        "on it. It is for trying a model, not for production: Triton and KServe serve its ONNX file.",
    )
    add_model(parser)
    option(parser, "--host HOST", "address to listen on", "127.0.0.1")
    option(parser, "--port PORT", "port; 0 chooses a free one", 8080)
    option(
        parser,
        "--allow-host NAME...",
        "another host name of this server, as a proxy or a Service gives it, "
        "or a pattern such as *.example.org; repeat it for more. IP addresses, localhost and this machine's "
        "name need none",
        dest="names",
    )
    add_inference(parser)
    parser.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> int:
    from trainer.export import published_models
    from trainer.export.predict import open_bundle
    from trainer.export.server import serve

    most_pixels = checked_pixel_limit(options)
    source = published_models.load(options.model, options.data_root)
    model = open_bundle(source, options.kind)
    serve(model, options.host, options.port, most_pixels, options.names)
    return 0
