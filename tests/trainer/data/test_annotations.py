import math
import re

import pytest

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import raw_folder, raw_manifest
from trainer.data.annotations import write_tables
from trainer.data.image_keys import distinct_key
from trainer.data.raw_folder import RawTable
from trainer.data.raw_manifest import SplitCounts
from trainer.data.sources.source import UNKNOWN, Box, Category, Entry, Listing, Rows

CATEGORIES = [Category("cat", 3), Category("dog", 17), Category("cow", 90)]


def entry(name: str, *categories: int) -> Entry:
    boxes = [Box(category, (1.0, 2.0, 3.0, 4.0), 0.0, 0) for category in categories]
    return Entry(name, name, 10, 10, boxes)


def rows_of(entries: list[Entry]) -> Rows:
    return Rows.of(lambda _: entries)


def listing(**splits: list[Entry]) -> Listing:
    return Listing(list(CATEGORIES), {split: rows_of(entries) for split, entries in splits.items()}, "")


@pytest.fixture
def rows(tmp_path):
    """Build a listing; return its categories and the rows of each split."""

    def made(source_listing, config=None, folder="raw"):
        uri = str(tmp_path / folder)
        built = write_tables(source_listing, config or DataConfig(), uri, "the source", frozenset())
        read = {}
        for split, counts in built.splits.items():
            kept = RawTable(str(tmp_path / folder / f"{split}.parquet"))
            blocks = map(kept.read_block, range(kept.block_count))
            read[split] = [row for block in blocks for row in block.to_pylist()]
            boxes = sum(len(row["boxes"]) for row in read[split])
            assert counts == SplitCounts(len(read[split]), boxes) and len(kept) == len(read[split])
        return built.categories, read

    return made


def labels(row):
    return [box["category"] for box in row["boxes"]]


def test_labels_are_contiguous_and_keep_the_original_ids(rows):
    categories, tables = rows(listing(train=[entry("a.jpg", 0, 1, 2)], val=[entry("b.jpg", 2)]))
    assert categories == [raw_manifest.Category(label, *one) for label, one in enumerate(CATEGORIES)]
    assert labels(tables["train"][0]) == [0, 1, 2] and labels(tables["val"][0]) == [2]


def test_ids_are_unique_over_splits_and_blocks(rows, monkeypatch):
    monkeypatch.setattr(raw_folder, "BLOCK", 3)
    train = [entry(f"{number}.jpg", 0) for number in range(8)]
    _, tables = rows(listing(train=train, val=[entry("1.jpg", 2)], test=[entry("1.jpg", 0)]))
    assert [row["image_id"] for split in ("train", "val", "test") for row in tables[split]] == [*range(1, 11)]
    assert [row["file_name"] for row in tables["train"]] == [item.file_name for item in train]


def test_a_row_holds_all_that_the_source_tells(rows):
    given = Entry(
        "a/é.JPG",
        "s3://b/a",
        7,
        9,
        [Box(1, (1.0, 2.0, 3.0, 4.0), 6.5, 1), Box(UNKNOWN, (math.nan,) * 4, 0.0, 0)],
        "id 1",
        ("image missing", "gone"),
        "v1",
    )
    _, tables = rows(listing(train=[given, entry("b.jpg", 0)]), DataConfig(val_fraction=0.0))
    row = tables["train"][0]
    first, second = row.pop("boxes")
    assert list(first.values()) == [1, 1.0, 2.0, 3.0, 4.0, 6.5, 1]
    assert second["category"] == UNKNOWN and second["x"] != second["x"]
    assert row == {
        "image_id": 1,
        "key": row["key"],
        "file_name": "a/é.JPG",
        "origin": "s3://b/a",
        "version": "v1",
        "width": 7,
        "height": 9,
        "original_id": '"id 1"',
        "fault_reason": "image missing",
        "fault_detail": "gone",
        "extra": "",
    }


def test_classes_filter_by_name_and_order(rows):
    source_listing = listing(
        train=[entry("a.jpg", 0, 1, UNKNOWN, 2), entry("c.jpg", 1)], val=[entry("b.jpg", 1, 2)]
    )
    categories, read = rows(source_listing, DataConfig(classes=["cow", "cat"]))
    assert [item.name for item in categories] == ["cow", "cat"]
    assert [labels(row) for row in read["train"]] == [[1, UNKNOWN, 0], []]
    assert [labels(row) for row in read["val"]] == [[0]]


def test_no_box_at_all_is_an_error(rows):
    with pytest.raises(DataError, match="no training image has a box of cat, dog, cow"):
        rows(listing(train=[entry("a.jpg"), entry("b.jpg", UNKNOWN)]))
    with pytest.raises(DataError, match="no training image has a box of cow"):
        rows(listing(train=[entry("a.jpg", 0)]), DataConfig(classes=["cow"]))


@pytest.mark.parametrize(
    "names",
    [
        ["a.jpg", "a.png", "A.JPG"],
        ["x/1.jpg", "y/1.jpg", "x_1.jpg"],
        ["猫.jpg", "犬.jpg", "é.jpg", "e.jpg"],
        ["n" * 300 + "1.jpg", "n" * 300 + "2.jpg"],
        ["noextension", "noextension.jpg"],
    ],
)
def test_keys_are_safe_and_unique(rows, names):
    _, tables = rows(listing(train=[entry(name, 0) for name in names]), DataConfig(val_fraction=0.0))
    keys = [row["key"] for row in tables["train"]]
    assert len({key.lower() for key in keys}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key) for key in keys)
    assert [row["file_name"] for row in tables["train"]] == names


def test_plain_names_stay_as_they_are_and_only_clashing_ones_change(rows):
    names = ["IMG_0001-a.JPG", "b.jpg", "b.png"]
    _, tables = rows(listing(train=[entry(name, 0) for name in names]), DataConfig(val_fraction=0.0))
    assert [row["key"] for row in tables["train"]] == [
        "IMG_0001-a",
        distinct_key("b", "b.jpg"),
        distinct_key("b", "b.png"),
    ]


@pytest.mark.parametrize(
    ("split", "count", "fraction", "expected"),
    [("val", 1, 0.5, 0), ("val", 2, 0.001, 1), ("val", 2, 1.0, 1), ("val", 50, 0.0, 0), ("val", 50, 1.0, 49),
     ("test", 1, 1.0, 0), ("test", 2, 1.0, 1), ("test", 50, 1.0, 49), ("test", 50, 0.0, 0)],
)  # fmt: skip
def test_of_small_sets_one_image_stays_in_train(rows, split, count, fraction, expected):
    source_listing = listing(train=[entry(f"{number}.jpg", 0) for number in range(count)])
    fractions = {"val_fraction": 0.0, "test_fraction": 0.0} | {f"{split}_fraction": fraction}
    _, read = rows(source_listing, DataConfig(**fractions))
    assert len(read.get(split, [])) == expected and len(read["train"]) == count - expected


def test_as_a_set_grows_no_image_leaves_its_split_and_a_test_image_never_trains(rows):
    """Ten versions, the last of which is smaller again."""
    was_in, tested = {}, {}
    for version, count in enumerate([1, 3, 10, 40, 100, 200, 300, 500, 800, 150]):
        source_listing = listing(train=[entry(f"{number}.jpg", 0) for number in range(count)])
        config = DataConfig(val_fraction=0.1, test_fraction=0.2)
        _, read = rows(source_listing, config, f"raw-{version}")
        parse_split = {row["file_name"]: split for split, table in read.items() for row in table}
        assert len(parse_split) == count == sum(map(len, read.values())) and read["train"]
        for name, split in parse_split.items():
            assert tested.setdefault(name, split == "test") == (split == "test"), name
            if count >= 40:  # Smaller sets give val an image that the share alone would not.
                assert was_in.setdefault(name, split) == split, name
        if count == 800:
            assert 130 < len(read["test"]) < 190 and 40 < len(read["val"]) < 90


def test_a_test_split_that_is_there_is_left_alone(rows):
    given = {"train": [entry(f"{number}.jpg", 0) for number in range(30)], "test": [entry("t.jpg", 0)]}
    _, tables = rows(listing(**given), DataConfig(test_fraction=0.5))
    assert [row["file_name"] for row in tables["test"]] == ["t.jpg"] and len(tables["train"]) < 30


def test_classes_are_named_by_text_ids_too(rows):
    source_listing = listing(train=[entry("a.jpg", 0, 1)])
    source_listing.categories[:] = map(Category, ("cat", "dog", "cow"), ("/m/cat", "/m/dog", "dog"))
    categories, _ = rows(source_listing, DataConfig(classes=["/m/dog", "cat"]))
    assert [item.original_id for item in categories] == ["/m/dog", "/m/cat"]
    # A name comes before another class's id.
    categories, _ = rows(source_listing, DataConfig(classes=["dog"]), "other")
    assert [item.original_id for item in categories] == ["/m/dog"]
    with pytest.raises(DataError, match="unknown classes: sheep") as caught:
        rows(source_listing, DataConfig(classes=["cat", "sheep"]), "unknown")
    assert "cat, dog, cow" in caught.value.fix
    with pytest.raises(DataError, match="lists twice: cat"):
        rows(source_listing, DataConfig(classes=["cat", "/m/cat"]), "twice")


def test_a_limit_of_images_chooses_the_same_ones_and_only_adds(rows):
    train = [entry(f"{number}.jpg", 0) for number in range(50)]
    val = [entry(f"v{number}.jpg", 0) for number in range(9)]
    names = []
    for limit in (5, 12, 0):
        tables = rows(listing(train=train, val=val), DataConfig(max_images=limit), f"of {limit}")[1]
        assert len(tables["val"]) == min(limit or 9, 9)
        names.append([row["file_name"] for row in tables["train"]])
    assert list(map(len, names)) == [5, 12, 50] and set(names[0]) < set(names[1])
    assert names[1] == sorted(names[1], key=names[2].index)
    backwards = rows(listing(train=train[::-1], val=val), DataConfig(max_images=5), "backwards")[1]
    assert {row["file_name"] for row in backwards["train"]} == set(names[0])


@pytest.mark.parametrize(
    ("what", "exhaustive", "kept"),
    [("auto", True, 3), ("auto", False, 1), ("keep", False, 3), ("drop", True, 1)],
)
def test_images_without_boxes(rows, what, exhaustive, kept):
    source_listing = listing(
        train=[entry("a.jpg", 0), entry("b.jpg"), entry("c.jpg", 1)], val=[entry("d.jpg", 0)]
    )
    source_listing.exhaustive = exhaustive
    _, read = rows(source_listing, DataConfig(classes=["cat"], empty_images=what))
    assert len(read["train"]) == kept
    assert source_listing.problems.counts.get(reasons.IMAGE_WITHOUT_BOXES, 0) == 3 - kept


def test_the_share_for_val_is_of_the_images_that_are_kept(rows):
    train = [entry(f"{number}.jpg", *([0] if number % 2 else [])) for number in range(40)]
    _, read = rows(listing(train=train), DataConfig(empty_images="drop", val_fraction=0.25))
    assert len(read["train"]) + len(read["val"]) == 20 and all(row["boxes"] for row in read["val"])
    assert 1 <= len(read["val"]) <= 10
