from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from trainer.base.errors import FormError
from trainer.base.typed_json import load


@dataclass(frozen=True)
class Part:
    name: str | int
    sizes: list[int]


@dataclass(frozen=True)
class Whole:
    parts: dict[str, Part]
    share: float
    note: str | None = None
    extra: dict[str, Any] | None = None
    more: list[Part] = field(default_factory=list)


SOUND: dict[str, Any] = {"parts": {"a": {"name": 3, "sizes": [1, 2.0]}}, "share": 1}


def test_what_is_written_is_read_back_equal():
    whole = load(Whole, SOUND | {"extra": {"any": [1]}, "more": [{"name": "x", "sizes": []}]}, "f", "")
    assert whole == Whole({"a": Part(3, [1, 2])}, 1, None, {"any": [1]}, [Part("x", [])])
    assert load(Whole, asdict(whole), "f", "") == whole


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"share": "1"}, "share is '1', not a number"),
        ({"share": True}, "share is True"),
        ({"parts": {"a": {"sizes": []}}}, "lacks parts.a.name"),
        ({"parts": {"a": {"name": "x", "sizes": [0, 1.5]}}}, r"parts.a.sizes\[1\] is 1.5, not an integer"),
        ({"parts": []}, "parts is "),
        ({"more": [3]}, r"more\[0\] is 3, not an object"),
        ({"note": 1}, "note is 1"),
        ({"extra": []}, "extra is "),
        ({"mroe": []}, "mroe is unknown"),
    ],
)
def test_errors_name_file_field_and_remedy(change, fault):
    with pytest.raises(FormError, match=f"^some.json:? {fault}") as caught:
        load(Whole, SOUND | change, "some.json", "write it again")
    assert caught.value.fix == "write it again"
