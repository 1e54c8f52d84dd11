"""Where the export step finds its key, and that nobody is left unsigned who counts on a signature."""

import pytest

from components.signing_secret import SIGNING, mounted_key
from trainer.base.errors import ConfigError


@pytest.fixture
def mounted(tmp_path):
    """A Secret as Kubernetes mounts it: what it keeps for itself begins with two dots."""

    def write(**keys):
        held = tmp_path / "..2026_11_21"
        held.mkdir()
        (tmp_path / "..data").symlink_to(held.name)
        for name, text in keys.items():
            (held / f"{name}.pem").write_text(text)
            (tmp_path / f"{name}.pem").symlink_to(f"..data/{name}.pem")
        return str(tmp_path)

    return write


@pytest.mark.parametrize("secret", [SIGNING, "ours"])
def test_a_mounted_key_is_found(mounted, secret):
    folder = mounted(private="key", public="key")
    assert mounted_key(secret, folder) == f"{folder}/private.pem"


def test_the_default_secret_need_not_exist(mounted, tmp_path):
    assert mounted_key(SIGNING, str(tmp_path / "nothing")) == ""
    assert mounted_key(SIGNING, mounted()) == ""


def test_a_secret_that_was_named_must_exist(mounted):
    with pytest.raises(ConfigError, match="the Secret ours gives no key to sign with: it is not there"):
        mounted_key("ours", mounted())


def test_a_secret_must_hold_the_key(mounted):
    with pytest.raises(ConfigError, match=r"(?s)it holds public\.pem.*--from-file=private\.pem="):
        mounted_key(SIGNING, mounted(public="key"))
