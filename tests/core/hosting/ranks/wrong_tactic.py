"""A kernel of FlagGems with a wrong configuration, which earlier starts or the timing of this one chose."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
import triton
import triton.language as tl

from fl_dispatch.aten_replacement.slot import slot_of
from fl_dispatch.backends.flaggems.aten.guard import Guard, State
from fl_dispatch.devices import CPU
from fl_dispatch.hosting.start import tactics

RIGHT, WRONG = 16, 32
timed: list[int] = []


def bench(call: Any, **_: Any) -> list[float]:
    """The wrong configuration, which is the second one, is faster."""
    timed.append(len(timed))
    return [1.0 / len(timed)] * 3


@triton.autotune([triton.Config({"BLOCK": size}) for size in (RIGHT, WRONG)], key=["elements"], do_bench=bench)
@triton.jit
def negate(x, y, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + places, mask=places < elements)
    tl.store(y + places, BLOCK // 16 - 1 - number, mask=places < elements)


def run(x: torch.Tensor) -> torch.Tensor:
    """Negate, as FlagGems would."""
    y = torch.empty_like(x)
    negate[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


def main(known: int) -> None:
    """Call it once, with the tactic of an earlier start if ``known`` is a block size, otherwise with a timed one."""
    x = torch.randn(60)
    if known:
        (name,) = tactics._tuners()
        (config,) = (str(one) for one in negate.configs if one.kwargs["BLOCK"] == known)
        tactics.remembered({name: {(x.numel(), *[str(x.dtype)] * 2): config}})
    tactics.begin()
    guard = Guard(slot_of("neg", "CPU"), run, State(CPU, strict=False))
    found = guard(x)
    right = torch.equal(found, -x)
    print(json.dumps({"right": right, "disabled": guard.why_disabled, "calls": guard.calls, "timed": len(timed)}))


if __name__ == "__main__":
    main(int(sys.argv[2]))
