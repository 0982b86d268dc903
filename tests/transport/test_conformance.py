"""Every transport of telegrad's own keeps to the contract."""

from __future__ import annotations

from functools import partial

import pytest
from conformance import ALL_CHECKS, check_transport, connected


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
def test_transport(transport, check):
    check_transport(partial(connected, transport), [check])
