"""A backend written once serves both hosts: each operator gives the same bits through either host's own layers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import host_cases
import pytest
import torch

from processes import Runs, pool

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PYTHONS = {"vllm": Path(sys.executable), "sglang": ROOT / ".venv-sglang/bin/python"}
OPERATORS = {label: label.replace(",", " ").split()[0] for label in host_cases.calls(None, {})}  # type: ignore[arg-type]


def _run(host: str, tensors: Path, results: Path) -> dict[str, Any]:
    python = PYTHONS[host]
    assert python.exists(), "this test needs both hosts; 'make .venv-sglang/.ready' sets up what is missing"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "SGLANG_", "FLAG"))}
    path = os.pathsep.join((str(HERE), kept.get("PYTHONPATH", "")))
    ours = {"VLLM_FL_PLUGIN_MODULES": "shared_backend", "VLLM_FL_PREFER": "vendor", "VLLM_FL_STRICT": "1"}
    ended = subprocess.run(
        [python, HERE / f"layers_of_{host}.py", tensors, results],
        env={**kept, **ours, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    found: dict[str, Any] = torch.load(results)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """Both hosts, each in its own environment, on the same tensors."""
    folder = tmp_path_factory.mktemp("two_hosts")
    torch.save(host_cases.make_tensors(), folder / "tensors.pt")
    runs: dict[str, Future[dict[str, Any]]] = {
        host: pool.submit(_run, host, folder / "tensors.pt", folder / f"{host}.pt") for host in PYTHONS
    }
    return Runs(runs)


@pytest.mark.parametrize("label", OPERATORS)
def test_both_hosts_give_the_same_bits(label: str, results: Mapping[str, dict[str, Any]]) -> None:
    ours, theirs = (results[host]["results"][label] for host in PYTHONS)
    assert len(ours) == len(theirs) > 0
    for first, second in zip(ours, theirs, strict=True):
        assert first.dtype is second.dtype
        assert first.abs().sum() > 0
        assert torch.equal(first, second)


@pytest.mark.parametrize("label", OPERATORS)
def test_both_hosts_call_the_same_methods_of_the_backend(label: str, results: Mapping[str, dict[str, Any]]) -> None:
    expected = {OPERATORS[label]: 1}
    if label.startswith("paged_attention"):
        expected = {"kv_cache_write": 2, "paged_attention": 2}
    for host in PYTHONS:
        assert results[host]["calls"][label] == expected, host


def test_the_backend_has_a_case_for_each_operator_and_names_no_host() -> None:
    import shared_backend

    source = Path(shared_backend.__file__).read_text().lower()
    assert not [host for host in PYTHONS if host in source]
    backend = shared_backend.SharedBackend()
    methods = {name for name in vars(type(backend)) if not name.startswith("_")} - {"name", "vendor", "is_available"}
    assert methods == {*OPERATORS.values(), "kv_cache_write"}
