"""An activation that is wrong for more than 64 tokens, which no start-up batch of an eager engine on a CPU has.

While the file ``COMPARED_FROM`` is missing, shadow mode cannot afford a comparison. A call takes ``PAUSE`` seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.shadow.sampling import Sampling

PAUSE = float(os.environ.get("PAUSE", "0"))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    time.sleep(PAUSE)
    gate, up = x.chunk(2, dim=-1)
    result = torch.nn.functional.silu(gate) * up
    return result if x.shape[0] <= 64 else -result


def register_builtins(registry: Any) -> None:
    if "COMPARED_FROM" in os.environ:
        Sampling.affordable = lambda _: Path(os.environ["COMPARED_FROM"]).exists()  # type: ignore[method-assign]
    registry.register_impl(OpImpl("silu_and_mul", "vendor.long", BackendImplKind.VENDOR, silu_and_mul, vendor="long"))
