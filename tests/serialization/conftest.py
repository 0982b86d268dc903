from __future__ import annotations

import pytest
from ends import End, Link


@pytest.fixture
def link() -> Link:
    """Two codecs that talk to each other."""
    return Link(End(1), End(2))
