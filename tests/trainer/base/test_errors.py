"""Messages of errors."""

import errno

import pytest

from trainer.base.errors import ResourceError
from trainer.base.os_errors import check_resources, name_resource_errors


def test_lack_of_memory_names_the_file():
    with (
        pytest.raises(ResourceError, match=r"a\.png cannot be read: there is not enough memory") as caught,
        name_resource_errors("a.png"),
    ):
        raise MemoryError
    assert "more memory" in caught.value.fix
    with (
        pytest.raises(ResourceError, match=r"a\.png: an image cannot be read: Too many open files"),
        name_resource_errors("a.png"),
    ):
        check_resources(OSError(errno.EMFILE, "x"))
    for error in (OSError("cut off"), ValueError("bad Huffman code")):
        check_resources(error)  # Corrupt bytes.
