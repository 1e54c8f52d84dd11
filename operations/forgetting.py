"""`kubedet data forget`: removes images from the data root, and from all data that is prepared later.

The list (`trainer.data.exclusions`) is written first: then no download fetches them. Then their bytes and the
raw tables and shards with them are deleted, the file that marks a folder as complete first. Run the same
command to finish an interrupted one. The records of trainings stay.
"""

from dataclasses import dataclass

from operations import lineage
from operations.retention import MARKERS
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.data import exclusions, training_record
from trainer.data.exclusions import Exclusion


@dataclass(frozen=True)
class Plan:
    """What forgetting images would delete, and the runs and models that used them."""

    images: list[Exclusion]
    files: list[str]  # URIs of their bytes.
    folders: list[str]  # Raw tables and shards with them, relative to the data root.
    runs: list[str]
    running: list[str]  # Of the runs, those without a result.
    models: list[str]


def plan(data_root: str, names: list[str]) -> Plan:
    """Plan to forget images, given by keys or file names."""
    seen_in = lineage.trained_on(data_root, frozenset(names))
    rows = [(fingerprint, row) for fingerprint, of_one in seen_in.items() for row in of_one]
    named = {name for _, row in rows for name in (row.key, row.file_name)}
    if unknown := sorted(set(names) - named):
        raise ConfigError(
            f"no shards in {data_root} contain the image {', '.join(unknown)}",
            fix="pass keys or file names, as for `kubedet model trace IMAGE`",
        )
    headers = {each: training_record.header(training_record.place(data_root, each)) for each in seen_in}
    listed = [Exclusion(row.key, row.file_name, headers[each].source) for each, row in rows]
    folders = [f"shards/{each}" for each in seen_in] + [f"raw/{head.raw}" for head in headers.values()]
    runs = [run for run in lineage.runs(data_root, strict=True) if run.fingerprint in seen_in]
    running = []
    for run in runs:
        folder = run.folder(data_root)
        has_result = storage.exists(storage.join(folder, "train", "result.json"))
        if not has_result and storage.exists(storage.join(folder, "config.json")):
            running.append(run.run)
    images = {f"{row.key}-{row.image}" for _, row in rows}
    root, parts = storage.join(data_root, "images"), {image.rpartition("-")[2][:2] for image in images}
    files = [
        storage.join(root, source, part, file)
        for source in sorted({name.partition("/")[0] for name in storage.list_files(root)})
        for part in sorted(parts)
        for file in storage.list_files(storage.join(root, source, part))
        if file.partition(".")[0] in images
    ]
    models = [item.shown for item in lineage.versions(data_root) if item.shards in seen_in]
    existing = [each for each in dict.fromkeys(folders) if storage.list_files(storage.join(data_root, each))]
    return Plan(list(dict.fromkeys(listed)), files, existing, [run.run for run in runs], running, models)


def forget(data_root: str, planned: Plan) -> None:
    """Execute a plan."""
    if planned.running:
        raise ConfigError(
            f"these runs are still training on the images: {', '.join(planned.running)}",
            fix="wait until they end, or stop them and delete their folders; then run the same command again",
        )
    exclusions.add(data_root, planned.images)
    for folder in planned.folders:
        uri = storage.join(data_root, folder)
        markers = MARKERS[folder.partition("/")[0]]
        for name in [*markers, *(each for each in storage.list_files(uri) if each not in markers)]:
            storage.delete(storage.join(uri, name))
    for uri in planned.files:
        storage.delete(uri)
