"""What an error says."""

import errno

import pytest

from trainer.base.errors import StorageError, WantError
from trainer.base.os_errors import naming, refuse_want


def test_a_remedy_is_on_a_line_of_its_own():
    assert str(StorageError("it is gone", fix="write it again")) == "it is gone\n  fix: write it again"
    assert str(StorageError("it is gone")) == "it is gone"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot read https://user:pw@host/x: no", "cannot read https://***@host/x: no"),
        ("https://h/x?a=1&X-Amz-Signature=abc&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://h/x?sig=abc", "https://h/x?sig=***"),
    ],
)
def test_passwords_and_signatures_are_left_out(message, shown):
    assert StorageError(message).message == StorageError(message).args[0] == shown


@pytest.mark.parametrize("message", ["s3://bucket/a:b@c", "http://host:9000/a@b", "https://h/x?a=b"])
def test_all_else_is_told(message):
    assert StorageError(message).message == message


def test_want_of_memory_names_what_was_read():
    with (
        pytest.raises(WantError, match=r"a\.png cannot be read: there is not enough memory") as caught,
        naming("a.png"),
    ):
        raise MemoryError
    assert "more memory" in caught.value.fix
    with (
        pytest.raises(WantError, match=r"a\.png: an image cannot be read: Too many open files"),
        naming("a.png"),
    ):
        refuse_want(OSError(errno.EMFILE, "x"))
    for error in (OSError("cut off"), ValueError("bad Huffman code")):
        refuse_want(error)  # of the bytes
