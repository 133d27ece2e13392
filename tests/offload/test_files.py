"""What is written: whole files through links, with their modes; pipes and devices as they are."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from triforce_offload.errors import OutputError, UsageError
from triforce_offload.files import Output, check_outputs


def write(path: object, content: str | bytes = "new") -> None:
    output = Output(path, "stats")
    output.check()
    output.write(content)


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path) -> None:
    path = tmp_path / "stats.json"
    write(path)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    path.chmod(0o640)
    write(path, b"newer")
    assert path.read_text() == "newer"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["stats.json"]


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_link_stays_and_its_target_changes(tmp_path) -> None:
    target, link = tmp_path / "target", tmp_path / "sub" / "link"
    link.parent.mkdir()
    link.symlink_to("../target")
    for content in ("first", "second"):
        # The first time the link leads nowhere yet.
        write(link, content)
        assert link.is_symlink()
        assert target.read_text() == content


def test_a_pipe_and_a_device_are_written_to(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write(pipe)
    reader.join(10)
    assert read == ["new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OutputError, match="cannot write the stats to /dev/full: No space left"):
        write("/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize("path", ["-", "/dev/stdout", "own"])
def test_standard_output_gets_it_behind_the_text(tmp_path, path: str) -> None:
    """A file that the text goes to is not replaced under it."""
    out = tmp_path / "out"
    path = str(out) if path == "own" else path
    code = (
        "import sys; from triforce_offload.files import Output; sys.stdout.write('text '); "
        f"o = Output({path!r}, 'stats'); o.check(); o.write('stats'); sys.stdout.write(' more')"
    )
    with open(out, "w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert out.read_text() == "text stats more"


def test_what_cannot_be_written_is_refused_before(tmp_path) -> None:
    for path in ("", tmp_path, tmp_path / "missing" / "file", read_only(tmp_path)):
        with pytest.raises(UsageError, match=f"cannot write the stats to {path}: "):
            Output(path, "stats").check()
    assert read_only(tmp_path).read_text() == "mine"


def read_only(directory: Path) -> Path:
    path = directory / "kept"
    if not path.exists():
        path.write_text("mine")
        path.chmod(0o444)
    return path


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch) -> None:
    path = tmp_path / "stats.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        write(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["stats.json"]


def test_one_path_is_for_one_thing(tmp_path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    check_outputs([Output(file, "stats"), Output(tmp_path / "other", "trace")])
    for pair in ((file, file), (file, link), ("-", "-")):
        with pytest.raises(UsageError, match="was given for the trace and for the stats"):
            check_outputs([Output(pair[0], "stats"), Output(pair[1], "trace")])
    file.write_text("a prompt")
    with pytest.raises(UsageError, match="for the stats and for the input"):
        check_outputs([Output(link, "stats")], inputs=[file])


def test_a_pipe_that_a_shell_made_gets_all_of_it(tmp_path) -> None:
    """As of `>(cat)`: what it is called resolves to nothing that can be opened."""
    read, written = os.pipe()
    content = "x" * 300_000
    code = (
        "import sys; from triforce_offload.files import Output; "
        "o = Output(f'/dev/fd/{sys.argv[1]}', 'stats'); o.check(); o.write('x' * 300_000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(written)], pass_fds=[written])
    os.close(written)
    with open(read) as file:
        assert file.read() == content
    assert process.wait(10) == 0


def test_a_log_that_standard_error_goes_to_is_not_replaced(tmp_path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys; from triforce_offload.files import Output; sys.stderr.write('before '); "
        "o = Output(sys.argv[1], 'stats'); o.check(); o.write('stats'); sys.stderr.write(' after')"
    )
    for path in ("/dev/stderr", str(log)):
        with open(log, "w") as file:
            subprocess.run([sys.executable, "-c", code, path], stderr=file, check=True)
        assert log.read_text() == "before stats after"


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM, errno.EROFS])
def test_a_file_that_cannot_be_replaced_is_written(tmp_path, monkeypatch, number: int) -> None:
    """As one that is mounted by itself, or that is another's in a shared folder."""
    path = tmp_path / "stats.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)
    write(path)
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["stats.json"]
    with pytest.raises(OutputError):
        write(tmp_path / "another")


def test_a_device_takes_several_things() -> None:
    check_outputs([Output("/dev/null", "stats"), Output("/dev/null", "trace")])


def test_files_of_a_directory_that_is_read_are_not_written_over(tmp_path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(model / "config.json")
    for path in (model / "config.json", tmp_path / "link"):
        with pytest.raises(UsageError, match="belongs to"):
            check_outputs([Output(path, "stats")], [model])
    check_outputs([Output(model / "new.json", "stats")], [model])
    with pytest.raises(UsageError, match="and for the input"):
        check_outputs([Output(model / "config.json", "stats")], [model / "config.json"])


def test_what_is_no_file_is_not_replaced_piece_by_piece(tmp_path) -> None:
    """A device or a pipe would become a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/null", "-", tmp_path):
        output = Output(path, "context")
        with pytest.raises(UsageError, match="cannot write the context to"):
            output.check_file()
        with pytest.raises(OutputError), output.writing() as file:
            file.write(b"x")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert Path("/dev/null").is_char_device()
    whole = tmp_path / "whole"
    whole.write_bytes(b"before")
    with pytest.raises(TypeError), Output(whole, "context").writing() as file:
        file.writelines([b"half", None])
    assert whole.read_bytes() == b"before"
    with Output(whole, "context").writing() as file:
        file.write(b"all")
    assert whole.read_bytes() == b"all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "whole"]
