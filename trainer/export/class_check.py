"""Classes of a model's next version: clients of another one would misread its labels."""

from trainer import storage
from trainer.errors import ConfigError
from trainer.export import bundle
from trainer.export.current_version import current, folder

_SHOWN = 10
ANOTHER_NAME = (
    "name this data set's model: --set export.name=NAME; or, if those who use the model know of it, "
    "--set export.other_classes=true"
)
"""What to do where the data have other classes than the model."""


def check_classes(data_root: str, name: str, classes: list[str], *, other_classes: bool, fix: str) -> None:
    """Refuse classes that are not those of a model's current version: its clients would misread the labels.

    Args:
        data_root: URI under which data is kept.
        name: the model's name.
        classes: names by label.
        other_classes: whether they may be other ones.
        fix: what to do.

    Raises:
        ConfigError: naming what differs.
        StorageError: the current version cannot be read.
    """
    record = None if other_classes else current(data_root, name)
    if record is None:
        return
    before = record.get("classes")
    if before is None:  # Written by an earlier version of this program.
        uri = storage.join(folder(data_root, name), record["version"])
        if not bundle.exists(uri):
            return
        before = [category["name"] for category in bundle.load(uri).metadata["classes"]]
    if before == classes:
        return
    parts = [
        f"{', '.join(sorted(some)[:_SHOWN])} only in {whose}"
        for some, whose in (
            (set(before) - set(classes), "that version"),
            (set(classes) - set(before), "this one"),
        )
        if some
    ]
    differing = "; ".join(parts) or "the same in another order"
    raise ConfigError(
        f"the classes are not those of {name} {record['version']}, the current version of this model in "
        f"{data_root}: {differing}",
        fix=fix,
    )
