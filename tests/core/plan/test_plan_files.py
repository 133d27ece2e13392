"""Plan files of earlier versions load, and mean what they meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from triforce_core.cli.main import main
from triforce_core.plan.plan import Plan
from triforce_core.settings import MethodSettings
from triforce_offload.errors import UsageError
from triforce_offload.plan.placement import Placement

# What the version of 2026-11-24 wrote, field by field, for a model of eight layers.
OLD = {
    "context_tokens": 8192,
    "block_tokens": 1024,
    "weights": "planes",
    "kv": "planes",
    "gpus": 2,
    "made_for": {"model": "some", "shape": "8 layers", "device": "rtx4090"},
    "predicted": {"seconds_per_token": 0.25, "placement": {"lent_kv_blocks": 24}},
    "method": "triforce",
    "draft": "auto",
    "draft_tokens": 40,
    "tree": "auto",
    "inner_draft_tokens": 6,
    "budget": 4096,
    "chunk_size": 16,
    "retrieval": "mass",
    "draft_weights": "planes",
    "draft_kv": "int8",
    "accept": "coupled",
    "streamed_layers": [1, 2, 3, 4, 5, 6],
    "embedding_resident": False,
    "resident_kv_blocks": 11,
    "weight_slots": 3,
    "kv_slots": 4,
    "staging_slots": 2,
    "lent_kv_blocks": 24,
    "substituted_layers": [1, 2],
    "file_layers": [3],
    "halved_layers": [4, 5],
}
MEANT = Plan(
    context_tokens=8192,
    block_tokens=1024,
    weights="split",
    kv="split",
    gpus=2,
    made_for=OLD["made_for"],
    predicted=OLD["predicted"],
    method=MethodSettings(
        draft_tokens=40,
        inner_draft_tokens=6,
        budget=4096,
        chunk_size=16,
        draft_weights="split",
        draft_kv="int8",
        accept="coupled",
    ),
    placement=Placement(
        streamed_layers=(1, 2, 3, 4, 5, 6),
        embedding_resident=False,
        resident_kv_blocks=11,
        weight_slots=3,
        kv_slots=4,
        staging_slots=2,
        reclaimed_kv_blocks=24,
        copied_layers=(1, 2),
        file_layers=(3,),
        split_layers=(4, 5),
    ),
)


def written(folder: Path, fields: Mapping[str, object]) -> Path:
    file = folder / "plan.json"
    file.write_text(json.dumps(fields))
    return file


def renamed(fields: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {names.get(name, name): value for name, value in fields.items()}


@pytest.mark.parametrize("copied", ["substituted_layers", "int4_layers", "copied_layers"])
def test_a_plan_with_names_of_its_time_means_the_same(tmp_path: Path, copied: str) -> None:
    file = written(tmp_path, renamed(OLD, {"substituted_layers": copied}))
    plan = Plan.read(file)
    assert plan == MEANT
    plan.write(file)
    assert Plan.read(file) == MEANT
    assert json.loads(file.read_text()).keys() == MEANT.as_dict().keys()


@pytest.mark.parametrize("old", ["lent_kv_blocks", "halved_layers", "substituted_layers"])
def test_a_layer_list_or_a_count_in_old_words_is_checked_as_one_in_new_words(
    tmp_path: Path, old: str
) -> None:
    with pytest.raises(UsageError, match="cannot be"):
        Plan.read(written(tmp_path, OLD | {old: -1}))


def test_fields_that_a_version_did_not_write_have_their_defaults(tmp_path: Path) -> None:
    """Those that came with GPUs, formats, copies, files and the CPU."""
    came_later = {
        *("gpus", "made_for", "predicted", "chunk_size", "accept", "draft_weights", "draft_kv"),
        *("weights", "kv", "lent_kv_blocks", "substituted_layers", "file_layers", "halved_layers"),
        *("retrieval", "tree"),
    }
    fields = {name: value for name, value in OLD.items() if name not in came_later}
    plan = Plan.read(written(tmp_path, fields))
    assert plan == Plan(
        8192,
        1024,
        MethodSettings(draft_tokens=40, inner_draft_tokens=6, budget=4096),
        Placement((1, 2, 3, 4, 5, 6), False, 11, 3, 4, 2),
    )


def test_a_plan_that_retrieved_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="attention mass alone"):
        Plan.read(written(tmp_path, OLD | {"retrieval": "mean"}))


def test_a_plan_in_old_words_is_planned_as_in_new_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`triforce plan --plan` counts the same bytes and seconds for it."""
    file = tmp_path / "new.json"
    asked = ["plan", "qwen2.5-32b", "--gpu", "rtx4090", "--context", "8192"]
    assert main([*asked, "--kv", "dense", "--save", str(file)]) == 0
    fields = json.loads(file.read_text())
    assert fields["copied_layers"]
    assert fields["reclaimed_kv_blocks"]
    old = {
        "copied_layers": "int4_layers",
        "reclaimed_kv_blocks": "lent_kv_blocks",
        "split_layers": "halved_layers",
    }
    earlier = written(tmp_path, renamed(fields, old) | {"retrieval": "mass"})
    capsys.readouterr()
    printed = []
    for each in (file, earlier):
        assert main([*asked[:4], "--plan", str(each), "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert printed[1]["plan"]["copied_layers"] == fields["copied_layers"]
    assert printed[1]["plan"]["reclaimed_kv_blocks"] == fields["reclaimed_kv_blocks"]
