from __future__ import annotations

import pytest

from triforce_core import SamplingParams
from triforce_offload.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", "0.9"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 1 << 63),
        ("stop_token_ids", ("a",)),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="typical_p"):
        SamplingParams(typical_p=0.5)
