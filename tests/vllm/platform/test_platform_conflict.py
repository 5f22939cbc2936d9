"""Beside another package's platform, the log names it and the setting that has the host ask this plugin alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import distributions
from vllm_fl.platform.startup import START


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a platform of its own."""
    entries = f"[{START.group}]\nother = other_platform:register\nfl = vllm_fl:register\n"
    monkeypatch.syspath_prepend(str(distributions.install(tmp_path, "other-platform", entries)))


def test_alone_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert "only one may be active" not in START.reason()


@pytest.mark.usefixtures("beside")
def test_another_platform_is_named_with_the_setting_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert START.reason().endswith("only one may be active: other; set VLLM_PLUGINS=fl")


@pytest.mark.usefixtures("beside")
def test_with_the_setting_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "fl")
    assert "only one may be active" not in START.reason()
