"""What an error says."""

import pytest

from trainer.errors import StorageError


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
