from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from builders import impl
from fl_dispatch import DispatchError, get_default_manager, reset_default_manager, reset_global_policy
from fl_dispatch.oplist import flaggems_operators, write_oplist


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
