"""Quantized products of one row ask for the next one's weight: which one that is, and who asks for which bytes.

That results stay the same and that the instruction runs: ``tests/gpu/kernels/test_following_gpu.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from fl_dispatch import successors
from fl_dispatch.backends.triton.impl.products import prefetch, scaled_linear

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


def weights(count: int) -> list[Tensor]:
    return [torch.zeros(64, 64) for _ in range(count)]


def recorded(*order: Tensor) -> None:
    with successors.recorded():
        for weight in order:
            assert successors.after(weight) is None


def test_weights_follow_in_the_order_of_the_recorded_step() -> None:
    first, second, third = weights(3)
    recorded(second, first, third)
    assert successors.known() == 2
    assert [successors.after(weight) for weight in (second, first, third)] == [first, third, None]
    assert successors.after(second[:32]) is first  # compiled code has a tensor of its own over the same memory


def test_products_of_int8_neither_ask_nor_are_recorded() -> None:
    first, second = weights(2)
    integers = torch.zeros(64, 64, dtype=torch.int8)
    with successors.recorded():
        for weight in (first, integers, second):
            prefetch.after(weight, 8)
    assert successors.after(first) is second
    successors._next[integers.data_ptr()] = successors._next[first.data_ptr()]
    assert prefetch.after(integers, 8) == (integers, *prefetch.NOTHING)


def test_a_call_that_is_tried_twice_is_one_call() -> None:
    first, second = weights(2)
    recorded(first, first, second, second)
    assert successors.known() == 1
    assert successors.after(first) is second


def test_a_weight_that_is_gone_is_not_asked_for_and_one_that_has_moved_is_where_it_is() -> None:
    first, second, third = weights(3)
    recorded(first, second, third)
    del third
    assert successors.after(second) is None
    assert successors.known() == 1
    second.data = torch.zeros(64, 64)
    found = successors.after(first)
    assert found is second
    assert found.data_ptr() == second.data_ptr()


def test_products_of_other_threads_are_not_recorded() -> None:
    first, other, second = weights(3)
    with successors.recorded(), ThreadPoolExecutor(1) as pool:
        successors.after(first)
        pool.submit(successors.after, other).result()
        successors.after(second)
    assert successors.after(first) is second
    assert successors.known() == 1


def test_another_step_takes_the_place_of_the_recorded_one_and_one_that_fails_too() -> None:
    first, second = weights(2)
    recorded(first, second)
    recorded(second, first)
    assert (successors.after(first), successors.after(second)) == (None, first)
    with pytest.raises(RuntimeError, match="step"), successors.recorded():
        raise RuntimeError("step")
    assert successors.after(second) is first


# -- who asks for what ------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (9, 0))


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, interpreted: bool = False) -> None:
    """Have a GPU with two processors."""
    prefetch._programs.cache_clear()
    monkeypatch.setattr(prefetch, "INTERPRETED", interpreted)
    monkeypatch.setattr(prefetch, "capability", lambda device: capability)
    monkeypatch.setattr(prefetch, "processors", lambda device: 2)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    prefetch._programs.cache_clear()


def asked(weight: Tensor, programs: int = 100) -> tuple[int, int, int] | None:
    """The numbers that programs get which multiply with the weight, if they ask."""
    found, where, asks = prefetch.after(weight, programs)
    assert (found is weight) != asks
    return where if asks else None


@pytest.mark.usefixtures("hopper")
def test_the_last_programs_ask_for_the_beginning_of_the_next_weight() -> None:
    first, second = weights(2)
    assert asked(first) is None
    recorded(first, second)
    assert asked(first) == (64 * 64 * 4, 4096, 100 - 2 * prefetch.ASKING)
    assert asked(first, 1) == (64 * 64 * 4, 64 * 64 * 4, 0)
    assert asked(second) is None


@pytest.mark.parametrize(
    ("capability", "interpreted"), [((8, 9), False), (None, False), ((9, 0), True)], ids=["8.9", "no NVIDIA", "CPU"]
)
def test_only_nvidias_chips_from_hopper_on_have_the_instruction(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, interpreted: bool
) -> None:
    on(monkeypatch, capability, interpreted)
    first, second = weights(2)
    recorded(first, second)
    assert asked(first) is None


@pytest.mark.usefixtures("hopper")
def test_nothing_is_asked_for_without_chip_features_across_devices_or_at_odd_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = weights(2)
    elsewhere = torch.zeros(64, 64, device="meta")
    odd = torch.zeros(65)[1:]
    for after in (elsewhere, odd):
        recorded(first, after)
        assert asked(first) is None
    recorded(first, second)
    assert asked(first) is not None
    monkeypatch.setattr(prefetch, "get_settings", lambda: type("Settings", (), {"chip_features": False}))
    assert asked(first) is None


@given(programs=st.integers(1, 40_000), size=st.integers(1, 1 << 28), processors=st.integers(1, 200))
def test_slices_are_the_beginning_of_the_weight_and_fit_the_instruction(
    programs: int, size: int, processors: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "_programs", lambda device, each: each * processors)
        patch.setattr(prefetch, "BYTES", 24 << 20)
        first, second = torch.zeros(1), torch.zeros(1, dtype=torch.uint8).expand(size)
        recorded(first, second)
        where = asked(first, programs)
    if where is None:
        assert size < prefetch.UNIT
        return
    total, each, begin = where
    assert total % prefetch.UNIT == each % prefetch.UNIT == 0
    assert 0 < total <= size
    assert each < 16 << 16  # sixteen bits for the number of units
    assert each * (programs - begin) >= total
    assert begin >= 0


KERNELS = r"""
import json, sys
from unittest import mock
sys.path.insert(0, sys.argv[1])
import kernel_cases
import torch
from fl_dispatch.backends.triton.impl.products import scaled_linear
kernel_cases.triton.runtime.driver.set_active(kernel_cases.CompilingDriver())
calls = {
    "fp8": lambda: kernel_cases._scaled(1, kernel_cases.FP8, columns=28672),
    "fp8, blocks": lambda: kernel_cases._scaled(1, kernel_cases.FP8, 128),
}
found = {}
for name, call in calls.items():
    for asks in (False, True):
        compiled = []
        after = lambda weight, programs: (weight, (3 << 20, 12032, 1784), asks)
        with mock.patch.object(scaled_linear, "after", after), kernel_cases.launches(False, compiled):
            call()
        (kernel,) = compiled
        ptx = kernel.asm["ptx"]
        asked = ptx.find("bulk.prefetch")
        found[f"{name} {asks}"] = [ptx.count("cp.async.bulk.prefetch"), ptx.index("st.global") < asked]
print(json.dumps(found))
"""


def test_for_hopper_a_program_asks_once_when_its_result_is_written_and_not_where_nothing_follows(
    tmp_path: Path,
) -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", KERNELS, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for name, counted in found.items():
        assert counted == [int("True" in name), "True" in name], name


def test_quantized_products_of_one_row_say_which_weight_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_launch_row", "_launch_rows"):
        monkeypatch.setattr(scaled_linear, name, lambda *args, **options: None)
    seen: list[tuple[torch.Size, int]] = []

    def after(weight: Tensor, programs: int) -> object:
        seen.append((weight.shape, programs))
        return weight, *prefetch.NOTHING

    monkeypatch.setattr(scaled_linear, "after", after)
    weight = torch.zeros(32, 64, dtype=torch.int8)
    for rows in (1, 2):
        x = torch.zeros(rows, 64, dtype=torch.int8)
        scaled_linear.scaled_linear(x, torch.ones(rows, 1), weight, torch.ones(32, 1))
    assert seen == [(weight.shape, 32)]
