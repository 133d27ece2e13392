"""The house: rooms import one way, no module imports itself through others, files stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
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
    ("triforce_core.params", "triforce_core.settings"),
    ("triforce_core.model",),
    ("triforce_core.plan",),
    ("triforce_core.decoding",),
    (
        *("triforce_core.engine", "triforce_core.loading", "triforce_core.request"),
        *("triforce_core.stream", "triforce_core.stats", "triforce_core.text"),
        *("triforce_core.opening", "triforce_core.layer_source", "triforce_core.devices"),
        *("triforce_core.execution", "triforce_core.saved", "triforce_core.conversation"),
        *("triforce_core.guiding", "triforce_core.batch", "triforce_core.pool"),
        "triforce_core.run_all",
        *("triforce_core.starting", "triforce_core.timeline", "triforce_core.parallel"),
    ),
    ("triforce_core.bench", "triforce_core.server"),
    ("triforce_core.cli", "triforce_core.__main__"),
    ("scripts",),
)
# Rooms of one floor that know nothing of each other.
APART = ({"triforce_core.bench", "triforce_core.server"},)


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
        + "\n".join(f"import {name}" for name in [*needed, "triforce_core.cli.plan"])
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
