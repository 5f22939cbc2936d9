"""vLLM's Triton kernels of state spaces in Triton's interpreter, behind our operators: python FILE REQUEST ANSWER.

A process of its own, because vLLM must believe in Triton, and in no CPU, when it defines the kernels.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import vllm.triton_utils
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from vllm.platforms import current_platform

from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cuda.impl import state_space
from fl_dispatch.ops import OPERATORS

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

torch.accelerator.device_index = lambda index: nullcontext()  # type: ignore[assignment, misc]
mamba_ssm.try_get_optimal_ssm_config = lambda *sizes: (8, 4)  # knows GPUs by their names
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
                if (answer := supports(*sample.args)) is not True:
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


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
