from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running import Running, serving


@pytest.fixture(scope="module")
def server(speaking) -> Iterator[Running]:
    with serving(speaking) as running:
        yield running
