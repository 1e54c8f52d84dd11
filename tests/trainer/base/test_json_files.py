"""JSON of ours: checked by the hash in it, its version and its form."""

import json
from functools import partial
from typing import Literal

import pytest
from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base.errors import DamagedError, DataError
from trainer.base.json_files import STRICT, decode, encode, parse


@dataclass(config=STRICT, frozen=True)
class Part:
    share: float
    note: str = ""


@dataclass(config=STRICT, frozen=True)
class Thing:
    name: str
    sizes: list[int]
    parts: dict[str, Part]
    kind: Literal["thing"] = "thing"
    version: Literal[3] = 3


THING = {"kind": "thing", "version": 3, "name": "ä", "sizes": [1, 2], "parts": {"a": {"share": 1}}}


@pytest.mark.parametrize("indent", [None, 2])
def test_what_is_written_is_read_without_its_hash(indent, tmp_path):
    uri = str(tmp_path / "x.json")
    storage.write_json(uri, THING, indent=indent)
    assert storage.read_json(uri) == THING
    assert storage.read_model(uri, Thing, "") == Thing("ä", [1, 2], {"a": Part(1)})
    storage.write_json(uri, {}, indent=indent)
    assert storage.read_json(uri) == {}
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
    assert parse(Thing, "x", json.dumps(THING).encode()).name == "ä"
    assert decode("x", b'["a"]') == ["a"] and decode("x", encode([1])) == [1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 99}, "another version of kubedet: its version is 99"),
        ({"version": 99, "name": None, "mroe": []}, "another version of kubedet: its version is 99"),
        ({"version": "3"}, "version is '3'"),
        ({"kind": "other"}, "kind is 'other'"),
        ({"name": None}, "name is None"),
        ({"sizes": [1, True]}, r"sizes\[1\] is True"),
        ({"sizes": [1.5]}, r"sizes\[0\] is 1.5"),
        ({"sizes": {}}, r"sizes is \{\}"),
        ({"parts": {"b": {}}}, r"lacks parts\.b\.share"),
        ({"parts": {"b": {"share": 1, "note": 2}}}, r"parts\.b\.note is 2"),
        ({"mroe": []}, "mroe is unknown"),
    ],
)
def test_errors_name_file_key_and_remedy(changes, named):
    with pytest.raises(DataError, match=named) as caught:
        parse(Thing, "the file", encode({**THING, **changes}), "write it again")
    assert "the file" in caught.value.message and caught.value.fix


@pytest.mark.parametrize("data", [b"[]", b"3", b"null"])
def test_something_else_than_an_object(data):
    with pytest.raises(DataError, match="its content is"):
        parse(Thing, "the file", data)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json(data):
    for read in (partial(parse, Thing), decode):
        with pytest.raises(DamagedError, match="the file is not JSON"):
            read("the file", data)
