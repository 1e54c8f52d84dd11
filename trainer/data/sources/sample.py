"""Generates synthetic images of five shapes from a seed.

A scene depends only on seed, size and its number, so any number of processes can draw scenes in any order.
Boxes are computed from the layout of a scene, which is faster than drawing it.
"""

import colorsys
import hashlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from trainer.data.problem_counts import Problems
from trainer.data.source_names import Sample
from trainer.data.sources.source import Box, Category, Entry, Listing, Rows, Source

CLASSES = ("circle", "square", "triangle", "star", "ring")

MIN_VISIBLE = 0.2  # Objects of which less is visible get no box.
_SUPERSAMPLING = 3
_CROWD_SHARE = 0.06
_EMPTY_SHARE = 0.04

Color = tuple[int, int, int]
Point = tuple[float, float]
Extent = tuple[int, int, int, int]


@dataclass
class Shape:
    """A shape to draw, in pixels of the image."""

    label: int
    outline: list[Point]
    hole: list[Point]  # The inside of a ring; empty for other shapes.
    fill: Color
    edge: Color


@dataclass
class Scene:
    """The layout of an image."""

    width: int
    height: int
    texture: str
    colors: tuple[Color, Color]
    angle: float
    seed: tuple[int, int]
    shapes: list[Shape] = field(default_factory=list)  # In drawing order: later ones cover earlier ones.
    objects: list[Box] = field(default_factory=list)  # Boxes of visible objects.


def layout_scene(seed: int, number: int, size: int) -> Scene:
    """Generate a scene; the sides of its image are 0.8 to 1.2 times `size` pixels."""
    rng = np.random.default_rng((seed, number))
    width, height = (int(size * rng.choice((0.8, 0.9, 1.0, 1.1, 1.2))) for _ in range(2))
    hue, dark = rng.random(), rng.random() < 0.5
    value = rng.uniform(0.15, 0.38) if dark else rng.uniform(0.68, 0.92)
    colors = tuple(
        _color(hue + rng.uniform(-0.08, 0.08), rng.uniform(0.05, 0.3), value + rng.uniform(-0.08, 0.08))
        for _ in range(2)
    )
    texture = str(rng.choice(("noise", "gradient", "stripes", "checks")))
    scene = Scene(width, height, texture, (colors[0], colors[1]), rng.uniform(0, math.pi), (seed, number))
    if rng.random() < _EMPTY_SHARE:
        return scene
    crowd = _add_crowd(scene, rng, size, dark) if rng.random() < _CROWD_SHARE else None
    taken: list[Extent] = [crowd] if crowd else []
    singles = []
    for _ in range(int(rng.integers(1, 7))):
        max_overlap = 0.6 if rng.random() < 0.2 else 0.02
        diameter = size * math.exp(rng.uniform(math.log(0.13), math.log(0.55)))
        label = int(rng.integers(len(CLASSES)))
        for _attempt in range(12):
            center = (rng.uniform(0.06, 0.94) * width, rng.uniform(0.06, 0.94) * height)
            shape = _make_shape(label, center, diameter, rng, dark)
            extent = _extent(shape)
            overlap = max((_overlap(extent, other) for other in taken), default=0.0)
            if overlap <= max_overlap and not (crowd and _overlap(extent, crowd) > 0):
                taken.append(extent)
                singles.append(shape)
                break
    scene.shapes += singles
    scene.objects += _visible_objects(scene, singles)
    return scene


def _add_crowd(scene: Scene, rng: np.random.Generator, size: int, dark: bool) -> Extent:
    """Add a dense group of shapes of one class with a crowd box; return its extent."""
    label = int(rng.integers(len(CLASSES)))
    wide, high = (int(size * rng.uniform(0.35, 0.5)) for _ in range(2))
    left = int(rng.uniform(0, scene.width - wide))
    top = int(rng.uniform(0, scene.height - high))
    step = max(8, size // 14)
    for y in range(top + step // 2, top + high, step):
        for x in range(left + step // 2, left + wide, step):
            center = (x + rng.uniform(-0.2, 0.2) * step, y + rng.uniform(-0.2, 0.2) * step)
            scene.shapes.append(_make_shape(label, center, step * rng.uniform(0.9, 1.15), rng, dark))
    extents = np.array([_extent(shape) for shape in scene.shapes])
    x0, y0 = np.maximum(extents[:, :2].min(axis=0), 0).tolist()
    x1, y1 = np.minimum(extents[:, 2:].max(axis=0), (scene.width, scene.height)).tolist()
    box = (float(x0), float(y0), float(x1 - x0), float(y1 - y0))
    scene.objects.append(Box(label, box, box[2] * box[3], 1))
    return x0, y0, x1, y1


def render_scene(scene: Scene) -> Image.Image:
    """Draw a scene: texture, shapes with smooth edges, and slight sensor noise."""
    rng = np.random.default_rng((*scene.seed, 1))
    y, x = np.mgrid[0 : scene.height, 0 : scene.width].astype(np.float32)
    along = x * math.cos(scene.angle) + y * math.sin(scene.angle)
    across = y * math.cos(scene.angle) - x * math.sin(scene.angle)
    period = rng.uniform(10, 26)
    if scene.texture == "gradient":
        mix = (along - along.min()) / max(float(np.ptp(along)), 1.0)
    elif scene.texture == "stripes":
        mix = 0.5 + 0.5 * np.sin(along * (2 * math.pi / period))
    elif scene.texture == "checks":
        mix = (np.floor(along / period) + np.floor(across / period)) % 2
    else:
        coarse = rng.random((scene.height // 12 + 2, scene.width // 12 + 2)).astype(np.float32)
        cloud = Image.fromarray(coarse).resize((scene.width, scene.height), Image.Resampling.BICUBIC)
        mix = np.clip(np.asarray(cloud), 0, 1)
    first, second = (np.array(color, dtype=np.float32) for color in scene.colors)
    background = Image.fromarray((first + (second - first) * mix[..., None]).astype(np.uint8))
    big = (scene.width * _SUPERSAMPLING, scene.height * _SUPERSAMPLING)
    canvas = background.resize(big, Image.Resampling.NEAREST)
    for shape in scene.shapes:  # With an edge and a soft highlight.
        x0, y0, x1, y1 = (value * _SUPERSAMPLING for value in _extent(shape))
        size = (x1 - x0, y1 - y0)
        mask = Image.new("L", size)
        draw = ImageDraw.Draw(mask)
        for points, fill in ((shape.outline, 255), (shape.hole, 0)):
            if points:
                moved = [(px * _SUPERSAMPLING - x0, py * _SUPERSAMPLING - y0) for px, py in points]
                draw.polygon(moved, fill=fill)
        light = Image.linear_gradient("L").resize(size).point(lambda value: 255 - value // 2)
        body = Image.composite(Image.new("RGB", size, shape.fill), Image.new("RGB", size, shape.edge), light)
        canvas.paste(shape.edge, (x0, y0), mask)
        canvas.paste(body, (x0, y0), mask.filter(ImageFilter.MinFilter(2 * _SUPERSAMPLING - 1)))
    image = canvas.reduce(_SUPERSAMPLING)
    noise = rng.normal(0, 4, (scene.height, scene.width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _visible_objects(scene: Scene, singles: list[Shape]) -> list[Box]:
    """Return the boxes of the visible parts of objects."""
    covered = Image.new("1", (scene.width, scene.height))
    visible: list[Box] = []
    for shape in reversed(singles):
        mask = Image.new("1", covered.size)
        draw = ImageDraw.Draw(mask)
        draw.polygon(shape.outline, fill=1)
        if shape.hole:
            draw.polygon(shape.hole, fill=0)
        seen = ImageChops.logical_and(mask, ImageChops.invert(covered))
        covered = ImageChops.logical_or(covered, mask)
        extent = seen.getbbox()
        area = float(np.count_nonzero(np.asarray(seen)))
        if extent is None or area < MIN_VISIBLE * (_area(shape.outline) - _area(shape.hole)):
            continue
        x0, y0, x1, y1 = extent
        bbox = (float(x0), float(y0), float(x1 - x0), float(y1 - y0))
        visible.append(Box(shape.label, bbox, area, 0))
    return visible[::-1]


def _make_shape(label: int, center: Point, diameter: float, rng: np.random.Generator, dark: bool) -> Shape:
    turn = rng.uniform(0, 2 * math.pi)
    stretch = rng.uniform(0.85, 1.18)
    cos, sin = math.cos(turn), math.sin(turn)

    def place(points: list[Point], radius: float) -> list[Point]:
        stretched = [(x * stretch, y / stretch) for x, y in points]
        return [
            (center[0] + radius * (x * cos - y * sin), center[1] + radius * (x * sin + y * cos))
            for x, y in stretched
        ]

    outline = place(_OUTLINES[CLASSES[label]], diameter / 2)
    hole = place(_OUTLINES["circle"], diameter / 2 * 0.55) if CLASSES[label] == "ring" else []
    hue = rng.random()
    value = rng.uniform(0.8, 1.0) if dark else rng.uniform(0.3, 0.6)
    fill = _color(hue, rng.uniform(0.55, 0.95), value)
    edge = _color(hue, 0.9, value * 0.55 if dark else value * 0.45)
    return Shape(label, outline, hole, fill, edge)


def _polygon(radii: list[float]) -> list[Point]:
    steps = [2 * math.pi * index / len(radii) for index in range(len(radii))]
    return [
        (radius * math.cos(step), radius * math.sin(step)) for radius, step in zip(radii, steps, strict=True)
    ]


_OUTLINES = {
    "circle": _polygon([1.0] * 40),
    "ring": _polygon([1.0] * 40),
    "square": _polygon([1.15] * 4),
    "triangle": _polygon([1.2] * 3),
    "star": _polygon([1.2, 0.5] * 5),
}


def _extent(shape: Shape) -> Extent:
    xs, ys = zip(*shape.outline, strict=True)
    return math.floor(min(xs)), math.floor(min(ys)), math.ceil(max(xs)), math.ceil(max(ys))


def _area(points: list[Point]) -> float:
    pairs = zip(points, points[1:] + points[:1], strict=True)
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairs)) / 2


def _overlap(a: Extent, b: Extent) -> float:
    """Return the area of the intersection relative to the smaller extent."""
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if wide <= 0 or high <= 0:
        return 0.0
    return wide * high / min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))


def _color(hue: float, saturation: float, value: float) -> Color:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, saturation, min(max(value, 0.0), 1.0))
    return round(red * 255), round(green * 255), round(blue * 255)


VERSION = 1  # Increase it if the same parameters would give other images.


@dataclass(frozen=True)
class SampleSource(Sample, Source):
    """Generated images; val and test each have a sixth of the number of train images."""

    cpu_bound = True

    def listing(self) -> Listing:
        """List the scenes, which are generated when the rows are iterated."""
        held_out = max(1, self.images // 6)
        splits = {}
        first = 0
        for split, count in (("train", self.images), ("val", held_out), ("test", held_out)):
            splits[split] = Rows.of(partial(self._entries, range(first, first + count)))
            first += count
        categories = [Category(name, number) for number, name in enumerate(CLASSES, 1)]
        return Listing(categories, splits, hashlib.sha256(f"{VERSION} {self.uri}".encode()).hexdigest())

    def read(self, origin: str) -> bytes:
        """Draw a scene as JPEG."""
        image = render_scene(layout_scene(self.seed, int(origin), self.size))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=92)
        return buffer.getvalue()

    def _entries(self, numbers: range, _: Problems) -> Iterator[Entry]:
        for number in numbers:
            scene = layout_scene(self.seed, number, self.size)
            size = scene.width, scene.height
            yield Entry(f"scene_{number:06}.jpg", str(number), *size, scene.objects)
