"""The key that signs exported models: where the export step finds it.

It is a file of a mounted Secret. No parameter, variable, specification or artifact holds it.
"""

from pathlib import Path

from trainer.errors import ConfigError

SIGNING = "kubedet-signing"
"""Name of the Secret, where nobody names another. It need not exist: then nothing is signed."""

KEY = "private.pem"
"""The key of the Secret whose value is the PEM file."""

FOLDER = "/etc/kubedet/signing"
"""Where the export step's pod mounts the Secret."""


def mounted_key(secret: str, folder: str = FOLDER) -> str:
    """Return the path of the mounted private key, or "" where there is none and none was asked for.

    Args:
        secret: name of the Secret that the run names.
        folder: where it is mounted.

    Raises:
        ConfigError: a Secret was named, or exists, but has no such key: the model would be
            published unsigned by somebody who counts on a signature.
    """
    mounted = Path(folder)
    if (mounted / KEY).is_file():
        return str(mounted / KEY)
    # What Kubernetes keeps for itself in a mounted Secret begins with two dots.
    found = sorted(path.name for path in mounted.glob("*") if not path.name.startswith(".."))
    if secret == SIGNING and not found:
        return ""
    held = f"it holds {', '.join(found)}" if found else "it is not there, or empty"
    raise ConfigError(
        f"the Secret {secret} gives no key to sign with: {held}",
        fix=f"kubectl create secret generic {secret} --from-file={KEY}=FILE, in the namespace of the run",
    )
