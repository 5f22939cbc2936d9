"""Wrong packings, planted in real implementations that prepare weights, and the check that verification finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_dispatch import get_default_manager, weight_forms
from fl_dispatch.evidence.verify import DTYPES, Verification, implementations, verify
from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import OpImpl

OPERATORS_WITH_WEIGHTS = [name for name, operator in OPERATORS.items() if operator.weights]
Make = Callable[[Tensor, Any], Any]


def name_of(make: Make) -> str:
    """Return the name of a packing function."""
    return make.func.__name__ if isinstance(make, partial) else make.__name__


def spoiled(weight: Tensor) -> Tensor:
    """Return a weight reversed along its first and last dimension: other orders of columns or experts, and of terms."""
    whole = weight.detach().contiguous()
    as_bits = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[whole.element_size()])
    return as_bits.flip(sorted({0, whole.dim() - 1})).view(weight.dtype)


@contextmanager
def watched(wrong: str = "", stale: str = "") -> Iterator[set[str]]:
    """Make one packing function pack another weight, or keep the first form; yield the names of all that ran."""
    names: set[str] = set()
    of = weight_forms.of

    def watching(weight: Tensor, name: str, make: Make) -> Any:
        called = name_of(make)

        def made(now: Tensor, before: Any) -> Any:
            names.add(called)
            if called == stale and before is not None:
                return before
            return make(spoiled(now) if called == wrong else now, before)

        return of(weight, name, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_forms, "of", watching)
        yield names


def candidates(op_name: str, device: torch.device) -> list[OpImpl]:
    """Return the implementations of an operator that run on a device here."""
    found = implementations(get_default_manager(), [op_name])
    here = [impl for impl in found if impl.device_types is None or device.type in impl.device_types]
    return [impl for impl in here if impl.availability()[0]]


def verified(impl: OpImpl, dtype: torch.dtype, device: torch.device) -> Verification:
    """Verify one implementation on the operator's samples, without calls under load."""
    samples = OPERATORS[impl.op_name].samples
    assert samples is not None
    own = samples(dtype, device, torch.Generator().manual_seed(0))
    return verify(get_default_manager(), impl, dtype, device, samples=own, repeats=1, race_calls=0)


def planted(op_name: str, device: torch.device) -> set[str]:
    """Plant a wrong packing in each implementation of an operator that prepares weights here.

    Returns:
        The packing functions that were spoiled, each of which verification blamed.
    """
    found: set[str] = set()
    for impl in candidates(op_name, device):
        for dtype in DTYPES:
            with watched() as names:
                right = verified(impl, dtype, device)
            assert right.problems == [], (impl.impl_id, dtype)
            for name in names if right.prepared else ():
                for fault in ({"wrong": name}, {"stale": name}):
                    with watched(**fault):
                        result = verified(impl, dtype, device)
                    assert result.verdict == "wrong", (impl.impl_id, dtype, fault)
                    assert all("with prepared weights" in problem for problem in result.problems)
                found.add(name)
    return found
