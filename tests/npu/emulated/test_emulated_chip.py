"""The emulated NPU itself: memory, PyTorch's operators on it, processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_npu

import emulated_npu

MIB = 1 << 20
Numbers = Callable[..., torch.Tensor]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def test_the_wheel_is_the_genuine_one_and_finds_one_device_of_two_gib() -> None:
    assert torch_npu.__version__.startswith("2.13.0")
    assert torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == "Ascend910B1"
    assert torch.npu.mem_get_info()[1] == 2048 * MIB


def test_memory_is_counted_and_used_again() -> None:
    torch.empty(1, device="npu")  # the first allocation may keep some MiB
    torch.npu.empty_cache()
    before = torch.npu.mem_get_info()[0]
    held = torch.empty(900 * MIB, dtype=torch.uint8, device="npu")
    assert before - torch.npu.mem_get_info()[0] == pytest.approx(900 * MIB, abs=24 * MIB)
    del held
    torch.empty(1400 * MIB, dtype=torch.uint8, device="npu")  # only without the 900 MiB


USAGE = """
import torch
from vllm_fl.platform.out_of_tree import PlatformFL
torch.npu.set_device(1)
before = PlatformFL.get_current_memory_usage()
x = torch.ones(8 << 20, dtype=torch.uint8, device="npu")
used = PlatformFL.get_current_memory_usage() - before
print("used", 8 << 20 <= used < 9 << 20, PlatformFL.get_current_memory_usage(torch.device("npu:0")) < 8 << 20)
"""


def test_vllm_is_told_what_this_process_holds_on_its_own_device() -> None:
    ended = python(USAGE, EMU_NPUS="2")
    assert "used True True" in ended.stdout, ended.stdout + ended.stderr


def test_an_allocation_above_the_total_fails_as_on_a_chip() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(3 * 1024 * MIB, dtype=torch.uint8, device="npu")


def test_a_view_shares_memory() -> None:
    x = torch.zeros(4, 6, device="npu")
    x[1:3].t()[2:4].fill_(1.0)
    assert x.cpu().nonzero().tolist() == [[1, 2], [1, 3], [2, 2], [2, 3]]
    assert x.chunk(2)[1].data_ptr() == x.data_ptr() + 12 * 4


def test_an_operation_in_place_returns_its_tensor() -> None:
    x = torch.ones(3, device="npu")
    assert x.add_(1) is x
    assert x.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("size", [0, 3, 8])
def test_out_is_written_and_resized(size: int) -> None:
    out = torch.empty(size, device="npu")
    made = torch.add(torch.ones(3, device="npu"), 1, out=out)
    assert made is out
    assert out.cpu().tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        lambda x: torch.nn.functional.one_hot(x.argsort(-1)[0, 0], 8),
        lambda x: x.softmax(-1) @ x.transpose(-1, -2),
        lambda x: torch.gather(x, -1, x.argsort(-1)),
        lambda x: torch.where(x > 0, x, 0).sort(stable=True).values,
        lambda x: x.repeat_interleave(2, 0).logcumsumexp(-1),
        lambda x: torch.nn.functional.embedding(torch.arange(2, device=x.device), x[0, 0]),
    ],
)
def test_operators_give_the_cpus_values(operation: Callable[[torch.Tensor], torch.Tensor], normal: Numbers) -> None:
    x = normal(2, 3, 4, 8)
    made = operation(x.npu())
    assert made.device.type == "npu"
    torch.testing.assert_close(made.cpu(), operation(x))


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match=r"same device, but aten::add got cpu, npu:0"):
        torch.ones(2, device="npu") + torch.ones(2)
    assert (torch.ones(2, device="npu") + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_a_generator_repeats_its_numbers_and_goes_on() -> None:
    def draw() -> list[torch.Tensor]:
        generator = torch.Generator("npu").manual_seed(7)
        return [torch.rand(5, device="npu", generator=generator).cpu() for _ in range(2)]

    (first, second), (again, _) = draw(), draw()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_devices_own_generator_is_seeded_by_manual_seed() -> None:
    drawn = []
    for _ in range(2):
        torch.npu.manual_seed(3)
        drawn.append(torch.empty(4, device="npu").exponential_().cpu())
    assert torch.equal(*drawn)
    assert not torch.equal(torch.randn(4, device="npu").cpu(), torch.randn(4, device="npu").cpu())


def test_events_measure_and_streams_are_distinct() -> None:
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.randn(400, 400, device="npu").pow(3).sum()
    end.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 10_000
    with torch.npu.stream(torch.npu.Stream()) as _:
        assert torch.npu.current_stream() != torch.npu.default_stream()


def test_gradients_pass_through() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_compiled_graph_holds_operators_of_the_chip(normal: Numbers) -> None:
    weight = normal(8).npu()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_swiglu(torch.nn.functional.linear(torch_npu.npu_rms_norm(x, weight)[0], x))

    x = normal(6, 8).npu()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))
    assert emulated_npu.calls() == {"npu_rms_norm": 2, "npu_swiglu": 2}


def test_a_process_announces_the_emulation_once_and_ends_normally() -> None:
    ended = python("import torch, torch_npu; print(torch.ones(2, device='npu').sum().item())")
    assert (ended.returncode, ended.stdout.split("\n")[-2]) == (0, "2.0")
    assert ended.stderr.count("INFO emulated_npu: npu devices of this process are emulated") == 1


def test_nothing_has_to_be_set_for_the_libraries() -> None:
    assert not os.environ.get("LD_LIBRARY_PATH")
    assert "torch_npu.libs/libascendcl.so" in Path("/proc/self/maps").read_text()


TWO_DEVICES = """
import torch
free = [torch.npu.mem_get_info(device)[0] for device in (0, 1)]
x = torch.arange(4 << 20, device="npu:1")
y = x.to("npu:0") + 1
print(torch.npu.device_count(), x.device, (x[:3] * 2).device, y.device, y[:3].tolist())
print([a - torch.npu.mem_get_info(device)[0] >= 32 << 20 for device, a in enumerate(free)])
try:
    x + y
except RuntimeError as error:
    print(error)
"""


def test_two_devices_have_memory_of_their_own() -> None:
    ended = python(TWO_DEVICES, EMU_NPUS="2", EMU_NPU_BYTES=str(256 * MIB))
    assert ended.stdout.splitlines()[-3:] == [
        "2 npu:1 npu:1 npu:0 [1, 2, 3]",
        "[True, True]",
        "Expected all tensors to be on the same device, but aten::add got npu:0, npu:1",
    ], ended.stderr


def test_visible_devices_are_those_that_are_named() -> None:
    ended = python("import torch; print(torch.npu.device_count())", EMU_NPUS="4", ASCEND_RT_VISIBLE_DEVICES="2,3")
    assert ended.stdout.split()[-1] == "2"


SPAWN = """
import multiprocessing
import emulated_npu
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        total = pool.apply(eval, ("__import__('torch').ones(3, device='npu').sum().item()",))
        print("sum", total, pool.apply(emulated_npu.calls))
"""


def test_a_spawned_process_is_emulated_too() -> None:
    ended = python(SPAWN)
    assert "sum 3.0 {}" in ended.stdout, ended.stdout + ended.stderr
    assert ended.stderr.count("INFO emulated_npu") == 2


def test_what_nobody_emulates_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"aclnn|no kernel|not in lib"):
        torch_npu.npu_fused_matmul(*(torch.ones(16, 16, device="npu", dtype=torch.float16),) * 2)
