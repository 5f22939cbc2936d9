"""Compiled C++ is kept where it can be, and loaded only if no other user can have written it (``fl_dispatch.cpp``)."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_dispatch import cpp

NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of C++ that was never compiled; the cache is in ``cache`` beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("fl_dispatch.cpp"), "propagate", True)
    path = tmp_path / "seven.cpp"
    path.write_text(
        f'extern "C" int seven() {{ return 7; }}  // {tmp_path}'
    )  # a name that was loaded is not loaded anew
    return path


def kept(source: Path) -> list[Path]:
    return list(source.parent.glob("cache/fl-dispatch/cpp/*"))


def load(source: Path) -> ctypes.CDLL:
    """As in a new process."""
    cpp.load.cache_clear()
    return cpp.load(source)


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are compiled from here on."""
    seen, compile_ = [], cpp._compile

    def compiling(command: list[str]) -> None:
        seen.append(command[-1])
        compile_(command)

    monkeypatch.setattr(cpp, "_compile", compiling)
    return seen


def in_a_process(function: Callable[[], object], user: int | None = None) -> str:
    """The result of a function in a process of its own, as text; or what it raised."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.close(read)
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            os.write(write, repr(function()).encode())
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


def number(source: Path) -> Callable[[], int]:
    """The number that a new process gets from the library."""
    return lambda: int(load(source).seven())


def test_it_is_compiled_once_for_a_processor_and_whoever_comes_second_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cpp.load(source).seven() == 7
    (kept,) = (tmp_path / "cache").glob("fl-dispatch/cpp/*")
    cpp.load.cache_clear()
    monkeypatch.setattr(cpp, "_compile", None)
    assert cpp.load(source).seven() == 7
    with monkeypatch.context() as other:
        other.setattr(cpp, "_processor", lambda: "another one")
        cpp.load.cache_clear()
        with pytest.raises(TypeError):
            cpp.load(source)
    (tmp_path / "included.h").write_text("// It may be what the file includes.")
    with pytest.raises(TypeError):
        cpp.load(source)
    assert kept.name.startswith("seven-")


@pytest.mark.parametrize("folder", ["a file", "below a file", "of the kernel", "a full disk", "a link to nowhere"])
def test_where_nothing_can_be_kept_each_process_compiles_for_itself_and_says_why(
    folder: str, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = source.parent / "cache"
    if folder == "a file":
        (cache / "fl-dispatch").mkdir(parents=True)
        (cache / "fl-dispatch/cpp").write_text("")
    elif folder == "below a file":
        cache.write_text("")
    elif folder == "of the kernel":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/fd")
    elif folder == "a link to nowhere":
        (cache / "fl-dispatch").mkdir(parents=True)
        (cache / "fl-dispatch/cpp").symlink_to("/proc/nowhere")
    else:

        def full(file: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
    compiled = compilations(monkeypatch)
    with caplog.at_level("INFO", "fl_dispatch.cpp"):
        assert [load(source).seven(), load(source).seven(), cpp.why_not(source)] == [7, 7, ""]
    assert len(compiled) == 2
    assert "seven.cpp is compiled by each process anew, because nothing can be kept (" in caplog.text
    assert not [path for path in kept(source) if path.is_file()], "nothing half-written is left"
    assert not Path(compiled[0]).exists(), "nor in the temporary folder"


@root
@pytest.mark.parametrize("mode", [0o755, 0o777], ids=["that is read-only", "that all may write"])
def test_another_users_folder_is_neither_written_nor_trusted(mode: int, source: Path) -> None:
    for folder in (*reversed(source.parents[:2]), source.parent.parent.parent):
        folder.chmod(0o755)
    assert cpp.load(source).seven() == 7
    (library,) = kept(source)
    library.unlink()
    library.parent.chmod(mode)
    assert in_a_process(number(source), NOBODY) == "7"
    assert kept(source) == []


@root
def test_a_library_that_another_user_wrote_is_never_loaded(source: Path) -> None:
    in_a_process(number(source))
    (library,) = kept(source)
    other = source.with_name("eight.cpp")
    other.write_text('extern "C" int seven() { return 8; }')
    made = source.with_name("eight.so")
    subprocess.run(["g++", "-shared", "-fPIC", str(other), "-o", str(made)], check=True)

    def planted(owner: int, mode: int) -> str:
        library.unlink()
        cpp._keep(made.read_bytes(), library)
        os.chown(library, owner, owner)
        library.chmod(mode)
        return in_a_process(number(source))

    assert planted(0, 0o644) == "8", "this user's own file counts"
    assert planted(NOBODY, 0o644) == "7"
    assert planted(0, 0o666) == "7"
    os.chown(library.parent, NOBODY, NOBODY)
    assert planted(0, 0o644) == "7"


def test_a_folder_of_this_user_is_closed_to_others(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(source)
    (library,) = kept(source)
    library.parent.chmod(0o777)
    compiled = compilations(monkeypatch)
    assert load(source).seven() == 7
    assert library.parent.stat().st_mode & 0o777 == 0o755
    library.chmod(0o666)
    assert load(source).seven() == 7
    assert (len(compiled), library.stat().st_mode & 0o777) == (1, 0o644), (
        "a file that others may have written is made anew"
    )


@pytest.mark.parametrize("rest", [0, 1, 4000, -1])
def test_a_library_that_was_half_written_is_compiled_anew(rest: int, source: Path) -> None:
    in_a_process(number(source))
    (library,) = kept(source)
    whole = library.read_bytes()
    library.write_bytes(whole[:rest])
    assert in_a_process(number(source)) == "7", "or the process ended"
    assert cpp._is_whole(library)


def test_a_relative_cache_folder_is_ignored_as_its_specification_says(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(source.parent / "home"))
    load(source)
    assert not (source.parent / "here").exists()
    assert len(list((source.parent / "home/.cache/fl-dispatch/cpp").iterdir())) == 1
