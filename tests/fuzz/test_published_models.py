"""Whatever is in a published model, commands end with a message and a remedy, and one hides no other."""

import json

import pytest
from bundles import make_bundle
from hostile import as_json, damaged, examples, refused, spoiled, values
from hypothesis import given
from hypothesis import strategies as st

from trainer.export import bundle, published_models


@pytest.fixture
def models(tmp_path):
    """A data root with two models, one of which will be spoiled; gives the root and that one's folder."""
    root = str(tmp_path / "data_root")
    for name in ("good", "odd"):
        source = make_bundle(tmp_path / name, name=name)
        published_models.publish(source, root, name)
    return root, tmp_path / "data_root" / "models" / "odd"


def all_commands(root: str, capsys) -> None:
    """Run what reads published models; the good one is always told."""
    refused("model", "list", "--data-root", root, capsys=capsys)
    assert published_models.read_current(root, "good")
    for words in (
        ("show", "odd"),
        ("verify", "odd"),
        ("show", "odd@v1"),
        ("promote", "odd", "v1"),
    ):
        refused("model", *words, "--data-root", root, capsys=capsys)


def listed(root: str, capsys) -> str:
    """Return what `kubedet model list` prints."""
    from kubedet import cli

    assert cli.main(["model", "list", "--data-root", root]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"v1/{bundle.METADATA}", f"v1/{bundle.CHECKSUMS}", "current"])
def test_spoiled_files(models, capsys, name):
    root, odd = models
    whole = (odd / name).read_bytes()
    contents = [damaged(whole)]
    if not name.endswith(bundle.CHECKSUMS):
        contents += [spoiled(json.loads(whole)).map(as_json), values.map(as_json)]

    @examples(20)
    @given(st.one_of(contents))
    def run(content):
        (odd / name).write_bytes(content)
        if name.endswith(bundle.METADATA):
            bundle.write_checksums(odd / "v1")
        all_commands(root, capsys)

    run()


WRONG = [b"", b"[]", b'{"version": "v1", "classes": 5}', b"[" * 9000]


@pytest.mark.parametrize("bad", ["current", f"v2/{bundle.METADATA}"])
@pytest.mark.parametrize("content", WRONG)
def test_one_bad_file_hides_no_model_and_a_version_can_be_promoted(models, capsys, content, bad, tmp_path):
    root, odd = models
    published_models.publish(make_bundle(tmp_path / "v2", name="odd", version="v2"), root, "odd")
    (odd / bad).write_bytes(content)
    bundle.write_checksums(odd / "v2")
    shown = listed(root, capsys)
    assert "* v1" in shown.partition("odd")[0] and ("v2  damaged" in shown) == (bad != "current")
    refused("model", "promote", "odd", "v1", "--data-root", root, capsys=capsys, codes=(0,))
    assert "* v1" in listed(root, capsys).partition("odd")[2]
