"""The Secret with the private key that signs exported models, and where the export step mounts it.

The key is only in the mounted file: no parameter, variable, specification or artifact holds it.
"""

from pathlib import Path

from trainer.base.errors import ConfigError

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
    # Kubernetes' own entries in a mounted Secret begin with two dots.
    keys = sorted(path.name for path in mounted.glob("*") if not path.name.startswith(".."))
    if secret == SIGNING and not keys:
        return ""
    contents = f"it holds {', '.join(keys)}" if keys else "it is not there, or empty"
    raise ConfigError(
        f"the Secret {secret} gives no key to sign with: {contents}",
        fix=f"kubectl create secret generic {secret} --from-file={KEY}=FILE, in the namespace of the run",
    )
