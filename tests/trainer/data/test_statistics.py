from trainer.data.statistics import BINS, SplitStatistics, compute_statistics


def sample(width: int, height: int, *boxes: tuple[int, float, float, int]) -> dict:
    """A sample with boxes of (label, width, height, iscrowd)."""
    annotations = [
        {"category_id": label, "bbox": [0, 0, w, h], "iscrowd": crowd} for label, w, h, crowd in boxes
    ]
    return {"width": width, "height": height, "annotations": annotations}


SAMPLES = [
    sample(640, 480, (0, 64, 16, 0), (0, 2, 2, 1), (2, 8, 512, 0)),
    sample(100, 400),
    sample(5000, 20, (2, 5000, 0.5, 0)),
]


def counted(described: SplitStatistics, name: str) -> dict[float, int]:
    """How many there are from each edge of a bin on, where there are any."""
    return {edge: count for edge, count in zip(BINS[name], described.histogram(name), strict=False) if count}


def test_what_is_counted():
    described = compute_statistics(SAMPLES, 3)
    assert (described.images, described.images_without_boxes, described.crowds) == (3, 1, 1)
    assert (described.boxes_of_class, described.images_of_class) == ([2, 0, 2], [1, 0, 2])
    # Sides: sqrt(64 * 16) = 32, 2, 64 and 50.
    assert counted(described, "box_side") == {0: 1, 32: 2, 64: 1}
    # Height over width: a quarter, 1, 64 times, and a ten thousandth: the last two lie beyond the bins.
    assert counted(described, "box_aspect") == {-4: 1, -2: 1, 0: 1, 3.5: 1}
    assert counted(described, "image_side") == {384: 1, 640: 1, 1600: 1}
    assert counted(described, "image_aspect") == {-2: 1, -0.5: 1, 1.75: 1}
    assert counted(described, "boxes_per_image") == {0: 1, 1: 1, 3: 1}
    assert sum(described.box_share) == 4


def test_parts_add_up_to_the_whole():
    for cut in range(4):
        assert compute_statistics(SAMPLES[:cut], 3) + compute_statistics(
            SAMPLES[cut:], 3
        ) == compute_statistics(SAMPLES, 3)
