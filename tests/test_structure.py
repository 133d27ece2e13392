"""The house: rooms import one way, no module imports itself through others, files stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kernels": "triforce_kernels",
    "offload": "triforce_offload",
    "triforce_core": "triforce_core",
}
MOST_LINES = 400
# From the lowest floor up: a module imports from its own floor and from those below.
FLOORS = (
    ("triforce_kernels",),
    ("triforce_offload",),
    ("triforce_core.params", "triforce_core.settings", "triforce_core.machine_settings"),
    ("triforce_core.model",),
    ("triforce_core.plan",),
    ("triforce_core.decoding",),
    (
        *("triforce_core.engine", "triforce_core.loading", "triforce_core.requests"),
        *("triforce_core.saved", "triforce_core.conversation", "triforce_core.parallel"),
    ),
    ("triforce_core.bench", "triforce_core.server"),
    ("triforce_core.cli", "triforce_core.__main__"),
    ("scripts",),
)
# Rooms of one floor that know nothing of each other.
APART = (
    {"triforce_core.decoding", "triforce_core.plan.simulation"},
    {"triforce_core.bench", "triforce_core.server"},
)


def modules() -> dict[str, Path]:
    paths = {}
    for folder, package in [*PACKAGES.items(), ("scripts", "scripts")]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            paths[".".join(parts).removesuffix(".__init__")] = path
    return paths


MODULES = modules()


def imports(name: str) -> set[str]:
    """Modules of the house that a module imports, inside functions and for types alone too."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*name.split(".")[: -node.level], *filter(None, [node.module])])
            targets = [f"{base}.{alias.name}" for alias in node.names] + [base]
        else:
            continue
        for target in targets:
            for known in (target, f"scripts.{target}"):
                if known in MODULES and known != name:
                    imported.add(known)
    # `from package import module` imports the module, not what the package's __init__ holds.
    return {m for m in imported if not any(other.startswith(f"{m}.") for other in imported)}


IMPORTS = {name: imports(name) for name in MODULES}


def floor(name: str) -> int:
    for height, rooms in enumerate(FLOORS):
        if any(name == room or name.startswith(f"{room}.") for room in rooms):
            return height
    raise AssertionError(f"{name} is on no floor")


@pytest.mark.parametrize("name", [name for name in MODULES if name != "triforce_core"])
def test_imports_run_one_way(name: str) -> None:
    for target in IMPORTS[name] - {"triforce_core"}:
        assert floor(target) <= floor(name), f"{name} imports {target}"
        for rooms in APART:
            here, there = (
                {room for room in rooms if module.startswith(f"{room}.")}
                for module in (name, target)
            )
            assert not here or not there or here == there, f"{name} imports {target}"


def test_no_module_imports_itself_through_others() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for target in sorted(IMPORTS[name]):
            visit(target, (*path, name))
        done.add(name)

    # The package itself names what it gives; nothing below asks it.
    for name in MODULES:
        if name != "triforce_core":
            visit(name, ())


def test_the_architecture_names_every_module() -> None:
    """By its path in its package, or by its room. Triton's versions lie beside what they do."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/]+)`", page))
    for name, path in MODULES.items():
        package, *parts = name.split(".")
        if package == "scripts" or path.stem.startswith("__") or path.stem.endswith("_triton"):
            continue
        assert "/".join(parts) in named or f"{parts[0]}/" in named, f"{name} is not in the page"


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_files_stay_short() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    files = [ROOT / name for name in tracked if (ROOT / name).exists()] or list(MODULES.values())
    assert not {str(path): lines(path) for path in files if lines(path) > MOST_LINES}


def test_what_marks_a_sub_package_is_empty() -> None:
    for name, path in MODULES.items():
        if path.name == "__init__.py" and "." in name:
            assert path.read_text("utf-8") == "", name


def test_the_planner_is_smaller_than_what_it_plans() -> None:
    def size(room: str) -> int:
        return sum(lines(path) for path in (ROOT / "triforce_core" / room).rglob("*.py"))

    assert size("plan") < size("decoding")


def test_a_plan_needs_no_torch_and_help_neither() -> None:
    """Every module that a plan loads, loaded without it."""
    needed = [name for name in MODULES if name.startswith("triforce_core.plan.")]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        + "\n".join(f"import {name}" for name in [*needed, "triforce_core.cli.plan.command"])
        + "\nfrom triforce_core.cli.main import main"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_no_code_of_a_model_is_run() -> None:
    """Without `trust_remote_code` transformers asks on standard input, which may be a prompt."""
    loaded = 0
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and re.match(
                r"Auto\w+\.from_pretrained$", ast.unparse(node.func)
            ):
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
                loaded += 1
    assert loaded


# Triton's kernels are one function each, whatever their length.
MOST_LINES_OF_A_FUNCTION = 60
MOST_FILES = 12


def test_functions_stay_short() -> None:
    long = {
        f"{name}.{node.name}": length
        for name, path in MODULES.items()
        if not path.stem.endswith("_triton")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION
    }
    assert not long


def test_rooms_stay_small() -> None:
    """Those of kernels/ aside: each has a kernel beside its reference."""
    counts = Counter(path.parent for path in MODULES.values())
    large = {str(room): count for room, count in counts.items() if count > MOST_FILES}
    assert not {
        room: count
        for room, count in large.items()
        if Path(room).is_relative_to(ROOT / "offload")
        or Path(room).is_relative_to(ROOT / "triforce_core")
    }


def test_auto_is_resolved_in_one_room() -> None:
    """Settings and the command line name it, plans resolve it; nothing else knows it."""
    for name, path in MODULES.items():
        if name == "triforce_core.settings" or name.startswith(
            ("triforce_core.cli.", "triforce_core.plan.", "scripts.")
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not (isinstance(node, ast.Name) and node.id == "AUTO"), name


# Where classes of formats and placements may be told apart: their own rooms, and the reading of
# checkpoints into them.
THEIR_ROOMS = (
    *("triforce_kernels.weights.", "triforce_offload.weights."),
    "triforce_offload.checkpoint.",
)


def test_formats_and_placements_are_not_told_apart_elsewhere() -> None:
    classes = {
        node.name
        for name, path in MODULES.items()
        if name.startswith(THEIR_ROOMS[:2]) or name == "triforce_offload.kv.block_format"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert {"Blocks", "SplitWeight", "DeviceLocation"} <= classes
    for name, path in MODULES.items():
        if name.startswith(THEIR_ROOMS):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = set(re.findall(r"\w+", ast.unparse(node.args[1])))
                assert not asked & classes, f"{name}:{node.lineno} {asked & classes}"
            if isinstance(node, ast.MatchClass):
                assert ast.unparse(node.cls) not in classes, f"{name}:{node.cls.lineno}"
