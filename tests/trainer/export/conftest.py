"""What the tests of the export share."""

import pytest
from bundles import make_bundle


@pytest.fixture
def made(tmp_path):
    """URI of a whole bundle."""
    return make_bundle(tmp_path / "made")
