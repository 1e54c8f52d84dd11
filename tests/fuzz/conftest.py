"""What the tests of hostile input share."""

from faulty_store import hurried

__all__ = ["hurried"]
