"""vLLM's Triton kernels of state spaces behind our operators: python FILE REQUEST ANSWER.

They run in Triton's interpreter, or, for a request of ``keys``, only say for what they would be compiled. A process of
its own, because vLLM must believe in Triton, and in no CPU, when it defines the kernels.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0" if "keys" in json.loads(Path(sys.argv[1]).read_text()) else "1"
sys.path.append(str(Path(__file__).parents[1] / "support"))
from interpreting import quicken

sys.path.pop()

import torch
import triton
import triton.language as tl
import vllm.triton_utils
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from vllm.platforms import current_platform

from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cuda.impl import state_space
from fl_dispatch.hosting.start import warm_batches
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.named import of_arguments

vllm.triton_utils.triton, vllm.triton_utils.tl, vllm.triton_utils.HAS_TRITON = triton, tl, True
with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
    import vllm.model_executor.layers.mamba.ops.ssd_combined
    from vllm.model_executor.layers.mamba.ops import (
        mamba_ssm,
        ssd_bmm,
        ssd_chunk_scan,
        ssd_chunk_state,
        ssd_state_passing,
    )

JOB = json.loads(Path(sys.argv[1]).read_text())
if "keys" not in JOB:
    quicken()
torch.accelerator.device_index = lambda index: nullcontext()  # type: ignore[assignment, misc]
mamba_ssm.get_ssm_device_name = lambda: "NVIDIA_H100_80GB_HBM3"
if "keys" not in JOB:
    mamba_ssm.try_get_optimal_ssm_config = lambda *sizes: (8, 4)
for module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing):
    for kernel in filter(lambda one: isinstance(one, Autotuner), vars(module).values()):
        kernel.configs = kernel.configs[:1]  # nothing is timed here


def with_bool_mask(access, place):  # type: ignore[no-untyped-def]
    """Some of the interpreter's masks are integers, which it refuses."""

    def run(*arguments):  # type: ignore[no-untyped-def]
        arguments[place].data = arguments[place].data.astype(bool)
        return access(*arguments)

    return run


builder = interpreter.InterpreterBuilder
builder.create_masked_load = with_bool_mask(builder.create_masked_load, 2)
builder.create_masked_store = with_bool_mask(builder.create_masked_store, 3)
CPU = torch.device("cpu")
FUNCTIONS = {
    "selective_scan": (state_space.supports_scan_of_heads, state_space.scan_of_heads),
    "selective_state_update": (state_space.supports_selective_state_update, state_space.selective_state_update),
}
LONGEST = 400
"""Rows of a batch that are interpreted in reasonable time."""


def share(got: torch.Tensor, wanted: torch.Tensor, name: str, args: tuple[object, ...]) -> float:
    """The largest error, as a share of the tolerance."""
    tolerance = OPERATORS[name].tolerance(torch.float16, args)
    if not got.numel():
        return 0.0
    return float(((got.double() - wanted).abs() / (tolerance.atol + tolerance.rtol * wanted.abs())).max())


def main(job: dict[str, str]) -> dict[str, object]:
    """Operator → label of each input → the reason against it, or the shares of the result and of the states."""
    name = job["operator"]
    supports, run = FUNCTIONS[name]
    place = list(OPERATORS[name].parameters).index("states")
    found = {}
    with mock.patch.object(state_space, "problem", return_value=""):  # they are on no GPU
        for make in (OPERATORS[name].samples, OPERATORS[name].probes):
            both = (make(torch.float16, CPU, torch.Generator().manual_seed(0)) for _ in range(2))
            for sample, again in zip(*both, strict=True):
                if sample.args[0].numel() and len(sample.args[0]) > LONGEST:
                    continue
                if (answer := of_arguments(supports, OPERATORS[name].parameters)(*sample.args)) is not True:
                    found[sample.label] = answer
                    continue
                wide = [
                    arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
                    for arg in again.args
                ]
                wanted, got = getattr(ReferenceBackend(), name)(*wide), run(*sample.args)
                shares = [share(got, wanted, name, sample.args)]
                found[sample.label] = [*shares, share(sample.args[place], wide[place], name, sample.args)]
    return {"found": found}


HEADS, HEAD_DIM, STATE = 80, 64, 128
INNER, CHANNELS = HEADS * HEAD_DIM, HEADS * HEAD_DIM + 2 * STATE
"""Mamba2-2.7B: vLLM has measured forms of its kernel for such states."""


def specialized(parameter: Any, value: Any) -> object:
    """The part of a value that decides about the compiled code."""
    if parameter.is_constexpr:
        return str(value)
    if isinstance(value, torch.Tensor):
        return str(value.dtype), parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
    if parameter.do_not_specialize or not isinstance(value, int):
        return type(value).__name__
    return "one" if value == 1 else value % 16 == 0


def call_mamba2(single: int, prompts: tuple[int, ...], apart: int) -> None:
    """The calls of a layer; the slots are a column of a table that is ``apart`` wide."""
    tokens = single + sum(prompts)
    dt = torch.zeros(tokens, INNER + CHANNELS + HEADS, dtype=torch.bfloat16)[:, INNER + CHANNELS :]
    slots = torch.zeros(single + len(prompts), apart, dtype=torch.int32)[:, 0]
    states, (a, d, bias) = torch.zeros(1, HEADS, HEAD_DIM, STATE), (torch.zeros(HEADS) for _ in range(3))

    def operands(rows: slice) -> tuple[torch.Tensor, ...]:
        mixed = torch.zeros(tokens, CHANNELS, dtype=torch.bfloat16)[rows].clone()
        x, b, c = mixed.split((INNER, STATE, STATE), dim=1)
        by_head, by_group = (-1, HEAD_DIM), (-1, STATE)
        return x.unflatten(1, by_head), dt[rows], a, b.unflatten(1, by_group), c.unflatten(1, by_group), d, bias, states

    if single:
        state_space.selective_state_update(*operands(slice(single)), slots[:single])
    if prompts:
        starts = torch.tensor([0, *accumulate(prompts)], dtype=torch.int32)
        known = torch.zeros(len(prompts), dtype=torch.bool)
        state_space.scan_of_heads(*operands(slice(single, tokens)), slots[single:].contiguous(), starts, known)


def call_mamba1(single: int, prompts: tuple[int, ...], apart: int) -> None:
    """The calls of one with a decay for each column, whose prompts have a compiled kernel."""
    if not single:
        return
    slots = torch.zeros(single, apart, dtype=torch.int32)[:, 0]
    x, dt, projected = (
        torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((single, INNER), (INNER, single), (single, 64))
    )
    b, c = projected[:, 32:48], projected[:, 48:]
    a, d, bias, states = torch.zeros(INNER, 16), torch.zeros(INNER), torch.zeros(INNER), torch.zeros(1, INNER, 1, 16)
    state_space.selective_state_update(x[:, :, None], dt.t(), a, b[:, None], c[:, None], d, bias, states, slots)


def batches(tokens: int, requests: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Drawn ones."""
    draw, lengths = random.Random(0), (1, 2, 15, 16, 17, 64, 100, 255, 256, 257)
    yield from ((single, ()) for single in range(1, requests + 1))
    for _ in range(150):
        single = draw.choice((0, 0, 1, 2, 5, 16, 33))
        prompts = tuple(draw.choices(lengths, k=draw.choice((1, 1, 2, 3, 16))))
        if single + sum(prompts) <= tokens and single + len(prompts) <= requests:
            yield single, prompts


def late(job: dict[str, int]) -> dict[str, object]:
    """Batches of a scheduler's for which some kernel was not compiled by those of the start."""
    keys: set[tuple[object, ...]] = set()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        given = {
            **dict(zip(names, args, strict=False)),
            **{name: options.pop(name) for name in names if name in options},
        }
        values = (specialized(parameter, given[parameter.name]) for parameter in kernel.params)
        keys.add((kernel.__name__, *values, *sorted(options.items())))

    found: list[object] = []
    limits = job["tokens"], job["requests"]
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        for call in (call_mamba2, call_mamba1):
            keys.clear()
            for batch in warm_batches.state_batches(*limits):
                call(*batch, 1)
            known = set(keys)
            for batch in batches(*limits):
                keys.clear()
                call(*batch, random.choice((1, 5, 32)))
                found += [[call.__name__, batch, key[0]] for key in keys - known]
    return {"late": found, "kernels": len(known)}


if __name__ == "__main__":
    result = late(JOB["keys"]) if "keys" in JOB else main(JOB)
    Path(sys.argv[2]).write_text(json.dumps(result))
