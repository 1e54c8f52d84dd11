"""Which images a run really ran: `<data_root>/lineage/images/<run>.json`, beside the record of its beginning.

    step      of the train step's own container
    training  of the pods that trained: several where an image was replaced under its name meanwhile

Each is `name@sha256:...` as the cluster tells it. They are noted when they are first seen, so that a run that
is killed has them too; what cannot be read or written is left out, and ends no training.
"""

import logging
import os
from typing import Any

from components.launchers.backend import JobStatus
from trainer import storage
from trainer.base.errors import DamagedError, FormError, KubedetError

logger = logging.getLogger(__name__)

STEP, TRAINING = "step", "training"
_FORM = storage.Form("images", 1, {"run": str, STEP: [str], TRAINING: [str]}, "the run writes it anew")


def place(data_root: str, run: str) -> str:
    """Return the URI of a run's images.

    Args:
        data_root: URI under which data are kept.
        run: the name of its folder.
    """
    return storage.join(data_root, "lineage", "images", f"{run}.json")


def read(data_root: str, run: str) -> dict[str, list[str]]:
    """Return the images of a run by who ran them, as far as they are known.

    Raises:
        StorageError: the data root cannot be read; DataError: the record is of a newer version.
    """
    uri = place(data_root, run)
    if not storage.exists(uri):
        return {}
    try:
        record = storage.read_json(uri, _FORM)
    except (DamagedError, FormError) as error:
        logger.warning("%s; it is left out", error.message)
        return {}
    return {key: record[key] for key in (STEP, TRAINING) if record[key]}


class Images:
    """Notes down the images of one run.

    Args:
        data_root: URI under which data are kept.
        run: the name of its folder.
    """

    def __init__(self, data_root: str, run: str) -> None:
        self._data_root, self._run = data_root, run
        self._noted: set[tuple[str, str]] = set()

    def look_at_own(self) -> None:
        """Note down what this process's own pod runs, where it is in one and may read it."""
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            return
        from components.launchers.cluster import client, own_pod

        try:
            self._note(STEP, {own_pod.read_image_id(client.connect())})
        except KubedetError as error:
            logger.info("the digest of this pod's image is not known: %s", error)

    def look(self, status: JobStatus) -> None:
        """Note down what the pods of a job run."""
        self._note(TRAINING, {pod.image_id for pod in status.pods})

    def _note(self, who: str, images: set[str]) -> None:
        new = {(who, image) for image in images if image} - self._noted
        if not new:
            return
        self._noted |= new  # Where it cannot be written, each later look would try it again.
        try:
            known = {(key, image) for key, of in read(self._data_root, self._run).items() for image in of}
            self._noted |= known
            record: dict[str, Any] = {"kind": "images", "version": 1, "run": self._run}
            record |= {
                key: sorted(image for of, image in self._noted if of == key) for key in (STEP, TRAINING)
            }
            storage.write_json(place(self._data_root, self._run), record)
        except KubedetError as error:
            logger.warning("the digests of the images are not kept: %s", error.message)
