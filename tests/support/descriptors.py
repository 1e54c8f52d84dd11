"""The open files of this process, by where they lie: other threads' sockets and pipes do not count."""

import os
from pathlib import Path


def open_below(folder):
    """Return the paths below a folder that this process holds open (Linux: /proc/self/fd)."""
    below = f"{Path(folder).resolve()}/"
    paths = []
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # Closed since the listing: the listing's own, for one.
            continue
        if path.startswith(below):
            paths.append(path)
    return paths
