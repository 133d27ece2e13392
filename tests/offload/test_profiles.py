"""Named hardware: figures with a source, links lane by lane, and clear refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triforce_offload.errors import UsageError
from triforce_offload.machine.profiles import (
    EMULATED,
    gpu_names,
    link_rate,
    named,
    parse_link,
    same_card,
    with_link,
)

NAMES = {
    *("rtx3060", "rtx3060ti", "rtx3070", "rtx3070ti", "rtx3080", "rtx3080ti", "rtx3090"),
    *("rtx3090ti", "rtx4060", "rtx4060ti-16gb", "rtx4070", "rtx4070super", "rtx4070ti"),
    *("rtx4070tisuper", "rtx4080", "rtx4080super", "rtx4090", "rtx5060ti-16gb", "rtx5070"),
    *("rtx5070ti", "rtx5080", "rtx5090", "rtx-a4000", "rtx-a5000", "rtx-a6000", "rtx6000-ada"),
    *("a10", "l4", "l40", "l40s", "a100-80gb", "h100", "h200"),
}
# What drivers call cards, of which one name begins another's.
DRIVERS = {
    "rtx3060": "NVIDIA GeForce RTX 3060",
    "rtx3060ti": "NVIDIA GeForce RTX 3060 Ti",
    "rtx4070": "NVIDIA GeForce RTX 4070",
    "rtx4070super": "NVIDIA GeForce RTX 4070 SUPER",
    "rtx4070ti": "NVIDIA GeForce RTX 4070 Ti",
    "rtx4070tisuper": "NVIDIA GeForce RTX 4070 Ti SUPER",
    "rtx5070ti": "NVIDIA GeForce RTX 5070 Ti",
    "rtx-a5000": "NVIDIA RTX A5000",
    "rtx6000-ada": "NVIDIA RTX 6000 Ada Generation",
    "a10": "NVIDIA A10",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "l4": "NVIDIA L4",
    "l40": "NVIDIA L40",
    "l40s": "NVIDIA L40S",
}


def test_every_card_has_sane_figures_and_a_source() -> None:
    assert set(gpu_names()) == NAMES
    for name in NAMES:
        card = named(name)
        assert card.source.startswith("NVIDIA ")
        assert 6 << 30 < card.memory_bytes < 150 << 30
        assert 200e9 < card.memory_bytes_per_second < 5e12
        # A forward of one token is bound by memory on all of them.
        assert card.flops_per_second / card.memory_bytes_per_second > 50
        assert named(name, 4).flops_per_second < card.flops_per_second
        assert card.link_full


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_s_name_is_of_one_card(name: str) -> None:
    assert [card for card in gpu_names() if same_card(card, DRIVERS[name])] == [name]


def test_a_link_is_as_fast_as_its_lanes() -> None:
    assert link_rate("pcie4x16") == pytest.approx(25.2e9, rel=0.01)
    assert link_rate("pcie4x8") == pytest.approx(link_rate("pcie4x16") / 2)
    assert link_rate("pcie5x8") == pytest.approx(link_rate("pcie4x16"), rel=0.01)
    assert parse_link("pcie3x4") == (3, 4)


def test_a_slot_never_gives_a_card_more_lanes_than_it_has() -> None:
    narrow = with_link(named("rtx4090"), "pcie5x8")
    assert (narrow.link, narrow.link_full) == ("pcie4x8", False)
    assert with_link(named("rtx4060ti-16gb"), "pcie4x16").link_full
    assert with_link(named("rtx5090"), "pcie4x16").link == "pcie4x16"


def test_links_share_what_host_memory_gives() -> None:
    two = replace(named("rtx4090"), gpus=2, host_bytes_per_second=40e9)
    assert two.stream_bytes_per_second == 20e9
    assert replace(two, gpus=1).stream_bytes_per_second == two.link_bytes_per_second


@pytest.mark.parametrize("wrong", ["rtx409", "RTX4090ti", "4090"])
def test_an_unknown_card_lists_the_nearest(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"nearest: .*rtx4090") as error:
        named(wrong)
    assert "names all" in str(error.value)
    assert "h200" not in str(error.value)


@pytest.mark.parametrize("wrong", ["pcie6x16", "pcie4x3", "4x16", ""])
def test_a_link_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="pcie4x16"):
        parse_link(wrong)


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090"])
def test_a_card_is_known_by_any_of_its_names(name: str) -> None:
    assert named(name) == named("rtx4090")


def test_cards_are_told_apart_by_what_drivers_call_them() -> None:
    same = (
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("a100-80gb", "NVIDIA A100 80GB PCIe"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("rtx4060ti-16gb", "NVIDIA GeForce RTX 4060 Ti"),
    )
    other = (
        ("rtx4090", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("rtx3060", "NVIDIA GeForce RTX 3060 Ti"),
        ("rtx4090", "NVIDIA GeForce RTX 3090"),
        ("rtx4090", EMULATED),
    )
    assert all(same_card(*pair) for pair in same)
    assert not any(same_card(*pair) for pair in other)
