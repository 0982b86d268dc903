from __future__ import annotations

from collections.abc import Iterator

import pytest
from running import Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("upstream") / "log")
    yield runner
    runner.close()
