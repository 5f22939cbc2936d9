"""Why the plugin's platform has one entry point name, ``fl``, and not ``sglang_fl`` beside it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import plugins


def point(name: str) -> Any:
    return SimpleNamespace(name=name, dist=SimpleNamespace(name="fl-dispatch"))


@pytest.mark.parametrize(("names", "excluded"), [(["fl"], set()), (["fl", "sglang_fl"], {"fl-dispatch"})])
def test_with_a_second_name_sglang_leaves_out_the_hooks_of_the_platform_that_the_user_selects(
    monkeypatch: pytest.MonkeyPatch, names: list[str], excluded: set[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "fl")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point(name) for name in names])
    assert plugins._get_excluded_dists() == excluded


def test_with_a_second_name_sglang_counts_two_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import platforms

    found = [EntryPoint(name, "sglang_fl:activate_platform", "sglang.srt.platforms") for name in ("fl", "sglang_fl")]
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setattr(plugins, "entry_points", lambda group: found)
    with pytest.raises(RuntimeError, match="Multiple platform plugins activated: 'fl', 'sglang_fl'"):
        platforms._resolve_platform()
