"""Z1 of what people keep: damaged contexts, plans, settings, answers, messages and prompts are read
or end in a typed error.
"""

from __future__ import annotations

import os

import pytest
from kept_files import KEPT, try_mutants

MUTANTS = int(os.environ.get("TRIFORCE_MUTANTS", "2000"))
# Of the mutants of a file are taken, and are refused.
LEAST = MUTANTS / 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", KEPT)
def test_what_is_damaged_is_read_or_refused(speaking, tmp_path, name: str) -> None:
    found = try_mutants(name, speaking, tmp_path, 0, MUTANTS)
    assert found.faults == []
    assert min(found.taken, found.refused) > LEAST
