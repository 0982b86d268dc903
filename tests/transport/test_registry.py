"""Which transports a worker gets."""

from __future__ import annotations

import pytest
from raw_peers import polling

from telegrad.options import Options
from telegrad.transport.inproc import Hub
from telegrad.transport.registry import TRANSPORTS, make_transports


@pytest.mark.parametrize(
    ("hub", "options", "names"),
    [
        (None, Options(), ["unix"]),
        (None, Options(transports=("tcp",)), ["tcp"]),
        (None, Options(transports=("tcp", "unix")), ["unix", "tcp"]),
        (None, Options(tcp_host="127.0.0.1"), ["unix", "tcp"]),
        (Hub(), Options(transports=("unix", "tcp")), ["inproc"]),
    ],
)
def test_the_transports_of_a_worker(hub, options, names):
    with polling() as (poller, lease):
        assert [transport.name for transport in make_transports(hub, poller, lease, options)] == names


def test_the_registry_and_the_options_know_the_same_names():
    assert Options(transports=tuple(TRANSPORTS)).transports == ("unix", "tcp")
    with pytest.raises(ValueError, match="choose from 'unix' and 'tcp'"):
        Options(transports=("inproc",))
