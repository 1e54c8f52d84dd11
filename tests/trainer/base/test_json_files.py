"""JSON of ours: checked by the hash in it, its version and its form."""

import json

import pytest

from trainer import storage
from trainer.base.errors import DamagedError, DataError
from trainer.base.json_files import decode, encode

FORM = storage.Form("thing", 3, {"name": str, "sizes": [int], "parts": {"*": {"share": float, "note?": str}}})
THING = {"kind": "thing", "version": 3, "name": "ä", "sizes": [1, 2], "parts": {"a": {"share": 1}}}


@pytest.mark.parametrize("indent", [None, 2])
def test_what_is_written_is_read_without_its_hash(indent, tmp_path):
    uri = str(tmp_path / "x.json")
    storage.write_json(uri, THING, indent=indent)
    assert storage.read_json(uri, FORM) == THING
    assert len(json.loads((tmp_path / "x.json").read_text())["file_sha256"]) == 64


@pytest.mark.parametrize("indent", [None, 2])
def test_every_flipped_bit_is_noticed(indent):
    data = encode(THING, indent)
    for at in range(len(data)):
        for bit in range(8):
            spoiled = bytearray(data)
            spoiled[at] ^= 1 << bit
            with pytest.raises(DamagedError, match=r"the file is (damaged|not JSON)"):
                decode("the file", bytes(spoiled))


@pytest.mark.parametrize("length", [0, 1, 20, -1, -70])
def test_what_is_cut_off_is_noticed(length):
    with pytest.raises(DamagedError, match="the file is not JSON"):
        decode("the file", encode(THING)[:length])


def test_json_of_others_is_taken_as_it_is():
    assert decode("x", json.dumps(THING).encode(), FORM) == THING
    assert decode("x", b'["a"]') == ["a"] and decode("x", encode([1])) == [1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 99}, "newer kubedet: its version is 99"),
        ({"version": "3"}, "version is '3', which is not a positive number"),
        ({"kind": "other"}, "its kind is 'other', not 'thing'"),
        ({"name": None}, "name is None, not a text"),
        ({"sizes": [1, True]}, r"sizes\[1\] is True, not an integer"),
        ({"sizes": {}}, r"sizes is \{\}, not a list"),
        ({"parts": {"b": {}}}, r"lacks parts\.b\.share"),
        ({"parts": {"b": {"share": 1, "note": 2}}}, r"parts\.b\.note is 2, not a text"),
        ({"parts": []}, r"parts is \[\], not an object"),
    ],
)
def test_another_form_is_named(changes, told):
    with pytest.raises(DataError, match=told) as caught:
        decode("the file", encode({**THING, **changes}), FORM)
    assert "the file" in caught.value.message and caught.value.fix


@pytest.mark.parametrize("data", [b"[]", b"3", b"null"])
def test_something_else_than_an_object(data):
    with pytest.raises(DataError, match="must be a JSON object"):
        decode("the file", data, FORM)
