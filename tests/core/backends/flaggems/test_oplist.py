"""The list of operators that FlagGems runs: right, the user's own, and never written where a stranger wants it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import impl
from fl_dispatch import DispatchError, get_default_manager, reset_default_manager, reset_global_policy
from fl_dispatch.hosting.start.oplist import flaggems_operators, write_oplist
from storm import fork_and_wait

NOBODY, SOMEBODY = 65534, 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


def test_the_list_names_the_operators_that_flaggems_runs() -> None:
    get_default_manager().registry.register_impl(impl("default.flagos", lambda x: x, op="silu_and_mul"))
    assert flaggems_operators(get_default_manager()) == ["silu_and_mul"]


def test_use_flaggems_false_leaves_the_list_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_FLAGGEMS", "0")
    reset_default_manager()
    reset_global_policy()
    get_default_manager().registry.register_impl(impl("default.flagos", lambda x: x, op="silu_and_mul"))
    assert flaggems_operators(get_default_manager()) == []
    assert get_default_manager().call("silu_and_mul", torch.ones(1, 4)).shape == (1, 2)


def test_the_file_is_the_users_own_and_one_a_rank(tmp_path: Path) -> None:
    path = write_oplist(tmp_path / "new" / "list.txt", ["a", "b"], rank=1)
    assert path == tmp_path / "new" / "list.rank1.txt"
    assert path.read_text() == "a\nb\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert write_oplist(tmp_path / "list.txt", []).read_text() == ""
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["list.txt"]


def test_a_planted_link_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "list.txt").symlink_to(target)
    with pytest.raises(DispatchError, match="is a link"):
        write_oplist(tmp_path / "list.txt", ["a"])
    assert target.read_text() == "precious"


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DispatchError, match="cannot be written"):
        write_oplist(tmp_path / "file" / "list.txt", ["a"])
    with pytest.raises(DispatchError, match="no regular file"):
        write_oplist(tmp_path, ["a"])


# ---- places that a stranger prepared


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder like ``/tmp``: everybody may write into it, and remove what is theirs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def refused_as(user: int, path: Path, match: str) -> bool:
    """Whether this user gets one error, on one line, that says this."""

    def child() -> bool:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        try:
            write_oplist(path, ["a"])
        except DispatchError as error:
            return match in str(error) and str(error).isprintable()
        return False

    return fork_and_wait(child) == 0


def planted_link(path: Path, target: Path) -> None:
    path.symlink_to(target)
    os.lchown(path, SOMEBODY, SOMEBODY)


@as_root
def test_a_folder_that_is_a_strangers_link_is_not_followed(public: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("precious")
    planted_link(public / "mine", tmp_path)
    with pytest.raises(DispatchError, match="a link that another user made"):
        write_oplist(public / "mine" / "list.txt", ["a"])
    with pytest.raises(DispatchError, match="a link that another user made"):
        write_oplist(public / "mine" / "deeper" / "list.txt", ["a"])
    assert (tmp_path / "list.txt").read_text() == "precious"
    assert not (tmp_path / "deeper").exists()


@as_root
def test_an_owners_link_in_a_folder_of_their_own_is_followed(public: Path, tmp_path: Path) -> None:
    (public / "theirs").mkdir(mode=0o755)
    os.chown(public / "theirs", SOMEBODY, SOMEBODY)
    planted_link(public / "theirs" / "logs", tmp_path)
    assert write_oplist(public / "theirs" / "logs" / "list.txt", ["a"]).read_text() == "a\n"
    (public / "theirs").chmod(0o777)
    with pytest.raises(DispatchError, match="a link that another user made"):
        write_oplist(public / "theirs" / "logs" / "list.txt", ["a"])


def test_a_link_of_the_users_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_oplist(tmp_path / "link" / "list.txt", ["a"])
    assert (tmp_path / "real" / "list.txt").read_text() == "a\n"


def test_a_hard_link_leaves_the_other_name_untouched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / "list.txt")
    write_oplist(tmp_path / "list.txt", ["a"])
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "list.txt").read_text() == "a\n"


@as_root
def test_a_folder_that_is_not_ours_is_one_error(public: Path) -> None:
    (public / "roots").mkdir(mode=0o755)
    assert refused_as(NOBODY, public / "roots" / "list.txt", "Permission denied")
    assert refused_as(NOBODY, public / "roots" / "new" / "list.txt", "Permission denied")
    assert list((public / "roots").iterdir()) == []


@as_root
def test_a_strangers_file_in_a_public_folder_is_one_error_and_stays(public: Path) -> None:
    (public / "list.txt").write_text("root's")
    assert refused_as(NOBODY, public / "list.txt", "Operation not permitted")
    assert (public / "list.txt").read_text() == "root's"
    assert [entry.name for entry in public.iterdir()] == ["list.txt"]


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o777], ids=["theirs alone", "everybody's, without a sticky bit"])
def test_an_explicit_path_in_a_folder_of_somebody_else_is_honoured(public: Path, mode: int) -> None:
    """As in a container that runs as root on a user's volume: the user named it, and no link is followed."""
    (public / "theirs").mkdir()
    os.chown(public / "theirs", SOMEBODY, SOMEBODY)
    (public / "theirs").chmod(mode)
    path = write_oplist(public / "theirs" / "list.txt", ["a"])
    assert (path.read_text(), path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == ("a\n", 0, 0o600)


def test_a_full_disk_is_one_error_and_the_old_list_stays(tmp_path: Path) -> None:
    write_oplist(tmp_path / "list.txt", ["old"])

    def child() -> bool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_oplist(tmp_path / "list.txt", ["operator"] * 1000)
        except DispatchError as error:
            return "cannot be written" in str(error)
        return False

    assert fork_and_wait(child) == 0
    assert (tmp_path / "list.txt").read_text() == "old\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["list.txt"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, make_socket, os.mkdir, lambda path: path.symlink_to("/dev/full"), lambda path: path.symlink_to("gone")],
    ids=["FIFO", "socket", "folder", "link to a device", "link to nothing"],
)
def test_a_target_that_is_no_regular_file_is_refused_and_stays(make: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    make(path)
    before = path.lstat()
    with pytest.raises(DispatchError, match="is a link or no regular file"):
        write_oplist(path, ["a"])
    assert path.lstat() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["list.txt"]


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "/", ".", "..", "/proc/list.txt", "x" * 300])
@pytest.mark.parametrize("rank", [None, 1])
def test_a_path_that_names_no_file_is_one_error(path: str, rank: int | None) -> None:
    if rank is not None and path.startswith("/dev/"):
        path += "/list.txt"
    with pytest.raises(DispatchError, match="FLAGGEMS_ENABLE_OPLIST_PATH: "):
        write_oplist(Path(path), ["a"], rank)


def test_a_path_with_line_breaks_is_used_as_it_is_and_shown_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a\nb" / "list\n.txt"
    assert write_oplist(path, ["a"]).read_text() == "a\n"
    path.unlink()
    path.mkdir()
    with pytest.raises(DispatchError) as caught:
        write_oplist(path, ["a"])
    assert str(caught.value).isprintable()
