"""Whether a folder can be written, asked before the work whose result goes there."""

import secrets

from trainer import storage


def check_writable(uri: str) -> None:
    """Write a small file into a folder, read it and delete it.

    Args:
        uri: the folder; a local one is made if it is not there.

    Raises:
        StorageError: one of the three is refused.
    """
    # A name of its own: several processes may ask at the same time.
    probe = storage.join(uri, f".writable-{secrets.token_hex(4)}")
    storage.write_bytes(probe, b"kubedet")
    storage.read_bytes(probe)
    storage.delete(probe)
