"""Retention: what of a data root is needed and why, and how the rest is freed.

    <data_root>/retention/lock/   lease (`trainer.launching.leases`): held to free space, and to start using
                                  data that may be freed
    <data_root>/retention/pins/   an empty file for each artifact that somebody wants kept, by its name
    <data_root>/retention/uses/   what runs that begin need, until their own records tell it

An artifact is a run, a version of a model, shards, raw tables, a name of data, all images of a source, or the
trainings of a search's trials. It has the name of its folder or file below the data root, such as
`runs/20261121-4f0c`.
"""

FOLDER = "retention"

GRACE = 24 * 3600.0  # Seconds for which whatever was written is kept.

UNENDED = 30 * 24 * 3600.0
"""Seconds for which a run without an end counts as running: so long may retries begin."""
