"""The wheel: what it installs, and that Hugging Face's `kernels` has its name to itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "offload", "triforce_core")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a folder build/ of an earlier layout would leave its modules in."""
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, source],
        check=True,
    )
    return next(out.glob("triforce_offload-*.whl"))


@pytest.mark.slow
def test_the_wheel_claims_our_names_and_not_kernels(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"triforce_core", "triforce_kernels", "triforce_offload"}
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            inside = file.relative_to(ROOT).as_posix()
            if folder != "triforce_core":
                inside = f"triforce_{inside}"
            assert inside in names, "every module is in the wheel"
    assert "triforce_offload/machine/data/gpus.toml" in names


@pytest.mark.slow
def test_another_package_called_kernels_imports_beside_ours(wheel: Path, tmp_path: Path) -> None:
    """A stand-in for Hugging Face's package, installed in the same place as ours."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("owner = 'hugging face'\n")
    code = (
        "import kernels, triforce_kernels.attention.attention as a;"
        "print(kernels.owner, a.__file__.startswith(__import__('sys').argv[1]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(site)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
    )
    assert out.stdout.split() == ["hugging", "face", "True"]


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "triforce"
    out = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("triforce ")
