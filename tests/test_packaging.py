"""The source archive, the wheel and the images: what they hold, and that Hugging Face's `kernels`
has its name to itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from triforce_core.cli.main import _parser
from triforce_core.cli.settings_file import kept_flags

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "kernels": "triforce_kernels",
    "offload": "triforce_offload",
    "triforce_core": "triforce_core",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
BUILT = shutil.ignore_patterns("__pycache__", "*.so")


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile, and its arguments on one line."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    joined = "".join(lines).replace("\\\n", "")
    return [(name, rest) for name, _, rest in (x.partition(" ") for x in joined.splitlines() if x)]


def values(name: str) -> list[str]:
    return [rest for each, rest in instructions() if each == name]


def copied() -> list[tuple[str, str]]:
    """What the Dockerfile copies from the checkout: each source, and the folder it goes to."""
    pairs = []
    for line in values("COPY"):
        if not line.startswith("--from="):
            *sources, target = line.split()
            pairs += [(source, target) for source in sources]
    return pairs


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, the first of which is FROM."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            found[rest.split(" AS ")[1]] = []
        if found:
            found[list(found)[-1]].append((name, rest))
    return found


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of what the Dockerfile copies, and the wheel of that archive.

    A folder build/ of an earlier layout would leave its modules in the wheel.
    """
    out, source = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("source")
    for name, target in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / target, ignore=BUILT)
        else:
            (source / target).mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / target)
    subprocess.run([sys.executable, "-P", "-m", "build", "--outdir", out, source], check=True)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def wanted(folder: str) -> Iterator[Path]:
    """Files of a package, without what is built from them."""
    for file in (ROOT / folder).rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so":
            yield file


@pytest.mark.slow
def test_the_wheel_claims_our_names_and_not_kernels(packages: tuple[Path, Path]) -> None:
    """Every module and every data file is in it, and nothing else."""
    names = zipfile.ZipFile(packages[1]).namelist()
    compiled = [name for name in names if name.startswith("triforce_kernels/host/_host.")]
    assert len(compiled) == 1
    inside = {name for name in names if ".dist-info/" not in name} - set(compiled)
    assert inside == {
        (FOLDERS[folder] / file.relative_to(ROOT / folder)).as_posix()
        for folder in FOLDERS
        for file in wanted(folder)
        if file.suffix not in (".c", ".h")
    }


@pytest.mark.slow
def test_the_source_archive_has_what_a_wheel_needs(packages: tuple[Path, Path]) -> None:
    with tarfile.open(packages[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    for folder in FOLDERS:
        assert {file.relative_to(ROOT).as_posix() for file in wanted(folder)} <= names
    assert {"constraints.txt", "CHANGELOG.md", "CITATION.cff", "README.md"} <= names
    assert not [name for name in names if name.startswith("tests/")]


@pytest.mark.slow
def test_the_metadata_names_the_licence(packages: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(packages[1])
    info = f"triforce_offload-{PROJECT['version']}.dist-info"
    about = message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert "License :: OSI Approved :: Apache Software License" in about.get_all("Classifier")
    assert about["Version"] == PROJECT["version"]
    for name in about.get_all("License-File", []):
        assert wheel.read(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()
    assert about.get_all("License-File") == ["LICENSE", "NOTICE.md"]


@pytest.mark.slow
def test_another_package_called_kernels_imports_beside_ours(
    packages: tuple[Path, Path], tmp_path: Path
) -> None:
    """A stand-in for Hugging Face's package, installed in the same place as ours."""
    site = tmp_path / "site"
    zipfile.ZipFile(packages[1]).extractall(site)
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
    assert out.stdout == f"triforce {PROJECT['version']}\n"


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == "Apache-2.0"
    assert citation["title"] == PROJECT["name"]
    assert citation["cff-version"] == "1.2.0"
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest
    assert newest[1] == PROJECT["version"]


def test_the_image_is_given_the_files_that_it_copies() -> None:
    """Nothing else of the checkout, and not what was built in it."""
    sources = [source for source, _ in copied()]
    for source in sources:
        assert (ROOT / source).exists(), source
    first, *lines = [
        line
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert first == "*"
    assert {line for line in lines if line.startswith("!")} == {f"!{name}" for name in sources}
    assert {"**/__pycache__", "**/*.so"} <= set(lines)
    assert {PROJECT["readme"], "LICENSE", "NOTICE.md", "constraints.txt"} <= set(sources)


def test_both_images_are_stages_on_one_base() -> None:
    found = stages()
    assert list(found) == ["build", "base", "cpu", "cuda"]
    python = dict(line.split("=") for line in values("ARG") if "=" in line)["PYTHON"]
    assert tuple(map(int, python.split("."))) >= (3, 11)
    for name in ("build", "base"):
        assert found[name][0] == ("FROM", f"python:${{PYTHON}}-slim AS {name}")
    for name in ("cpu", "cuda"):
        assert found[name][0] == ("FROM", f"base AS {name}")
        assert found[name][-1] == ("USER", "triforce"), "nothing runs as root"
    for line in values("COPY"):
        if origin := re.match(r"--from=(\S+)", line):
            assert origin[1] in found


def test_images_are_built_as_the_check_of_the_wheel_does() -> None:
    """What installs is written once, in scripts/packages.sh."""
    check = (ROOT / "scripts" / "checks" / "wheel.sh").read_text("utf-8")
    runs = {
        name: " ".join(rest for each, rest in lines if each == "RUN")
        for name, lines in stages().items()
    }
    for stage, name in (
        ("build", "build_packages"),
        ("cpu", "install_wheel"),
        ("cuda", "install_wheel"),
    ):
        assert re.search(rf"\b{name} ", runs[stage])
        assert re.search(rf"^    {name} ", check, re.MULTILINE)
    assert "pip install" not in "".join(runs.values())


def test_the_image_starts_a_server() -> None:
    """Its variables and its default command are those of the command line."""
    assert [json.loads(line) for line in values("ENTRYPOINT")] == [["triforce"]]
    command = json.loads(values("CMD")[-1])
    parser, commands = _parser()
    variables = dict(pair.split("=", 1) for line in values("ENV") for pair in line.split())
    flags = kept_flags(command[0], commands, variables)
    args = parser.parse_args([command[0], *flags, *command[1:]])
    assert (args.host, args.port) == ("0.0.0.0", 8080)
    assert values("EXPOSE") == [str(args.port)]
    volumes = values("VOLUME")
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        assert Path(variables[name]).is_relative_to(volumes[0]), name


@contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """A server with one answer. Yield its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def health(port: int) -> subprocess.CompletedProcess[str]:
    """Run the check of the Dockerfile."""
    command = json.loads(values("HEALTHCHECK")[0].partition(" CMD ")[2])
    assert command[0] == "python"
    environment = {**os.environ, "TRIFORCE_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [(200, '{"status": "ok"}', 0), (503, '{"status": "loading", "progress": []}', 1)],
)
def test_the_health_check_asks_the_server(status: int, body: str, code: int) -> None:
    """It says what the server answered, and asks it directly, whatever the proxy."""
    with answering(status, body.encode()) as port:
        done = health(port)
    assert (done.returncode, done.stdout.strip()) == (code, body)


def test_a_server_that_is_not_there_is_not_healthy() -> None:
    with answering(200, b"") as port:
        pass
    assert health(port).returncode == 1


def test_loading_does_not_count_as_a_failure_at_first() -> None:
    options = values("HEALTHCHECK")[0].partition(" CMD ")[0].split()
    assert "--start-period=1h" in options
