"""The transfer between engines is found by entry points, as a package from outside would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

import distributions
from fl_dispatch.errors import PluginLoadError
from fl_transfer import extension
from vllm_fl.extensions import GROUP, extensions
from vllm_fl.host import HOST


def installed(folder: Path, group: str, line: str) -> Path:
    """A distribution that has one entry point, in a folder for ``sys.path``."""
    return distributions.install(folder, "outside", f"[{group}]\n{line}\n", "1.0")


def test_the_plugin_finds_the_transfer_by_its_entry_point() -> None:
    assert extensions() == (extension,)


def test_what_is_offered_loads_by_its_name() -> None:
    extension.offer()
    for name in extension.NAMES:
        assert KVConnectorFactory._registry[name]().__name__ == extension.CONNECTOR
    for backend, (worker, trainer) in extension.ENGINES.items():
        assert WeightTransferEngineFactory._registry[backend]().__name__ == worker
        assert WeightTransferTrainerFactory._registry[backend]().__name__ == trainer


def test_the_hosts_contract_has_the_facts_of_extensions_with_their_package() -> None:
    names = {(fact.owner, fact.names) for fact in HOST.facts() if fact.used_by.startswith("fl_transfer.")}
    assert names == {(fact.owner, fact.names) for fact in extension.facts()}


def test_an_extension_that_does_not_load_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, GROUP, "outside = outside_that_is_not_there"))
    said = (
        r"^the extension 'outside' \(outside_that_is_not_there\) of vllm_fl does not load: ModuleNotFoundError: "
        r"No module named 'outside_that_is_not_there'; repair or uninstall its package$"
    )
    with pytest.raises(PluginLoadError, match=said):
        extensions.__wrapped__()


def test_a_command_that_does_not_load_is_left_out_and_the_others_run(tmp_path: Path) -> None:
    path = installed(tmp_path, "fl_dispatch.command", "outside = outside_that_is_not_there:command")
    done = subprocess.run(
        [sys.executable, "-c", "from fl_dispatch.cli import main; main()", "--help"],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "p2p-proxy" in done.stdout
    assert "outside" not in done.stdout
    assert "fl outside (outside_that_is_not_there:command) is left out" in done.stderr
