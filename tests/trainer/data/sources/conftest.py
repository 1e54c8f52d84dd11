"""A small Open Images for the tests of this folder."""

from openimages_mirror import mirror

__all__ = ["mirror"]
