"""Verification inside a vendor's own test suite, in two lines of a test module:

.. code-block:: python

    from fl_dispatch.evidence.pytest_plugin import verified
    test_kernels = verified("vendor.mychip")

One test for each operator and dtype. No entry point loads this module, because every run of pytest in the
environment would then import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from ..devices import detect_device
from ..logger_manager import get_logger
from ..manager import get_default_manager
from ..ops import Sample
from .inputs import Inputs
from .verify import DTYPES, Verification, implementations, verify

logger = get_logger(__name__)

MakeSamples = Callable[[str, torch.dtype, torch.device], Sequence[Sample]]
"""Operator, dtype and device → inputs."""


def verified(
    impl_id: str,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    operators: Sequence[str] | None = None,
    device: str | None = None,
    samples: MakeSamples | None = None,
    seed: int = 0,
    compiled: str = "",
    may_be_absent: bool = False,
) -> Callable[..., Any]:
    """Return a parametrized test that verifies every implementation with this id.

    An implementation that prepares weights is verified with prepared and with plain ones; pytest's
    ``--log-cli-level=INFO`` shows the numbers of inputs.

    The test fails if it verifies nothing: if an implementation is unavailable, or declines every input of its operator
    in all dtypes. An implementation that declines every input in one dtype skips that dtype's test.

    Args:
        impl_id: the id, such as ``vendor.mychip``. Its backend is found as usual: by entry point, or by its name in
            ``VLLM_FL_PLUGIN_MODULES``.
        dtypes: dtypes of the inputs.
        operators: only these; a listed operator without such an implementation is a failure.
        device: PyTorch device; this machine's by default.
        samples: makes inputs in place of the declared ones.
        seed: seed of the declared inputs.
        compiled: the backend of ``torch.compile`` through which calls go, such as ``eager``; empty for direct calls.
        may_be_absent: skip if the implementation is unavailable, as in CI on a machine without the chip.
    Raises:
        DispatchError: no implementation has this id.
    """
    names = [impl.op_name for impl in implementations(get_default_manager(), operators, [impl_id])]

    @cache
    def found(op_name: str, dtype: torch.dtype) -> Verification:
        manager, place = get_default_manager(), torch.device(device or detect_device().torch_type)
        (impl,) = implementations(manager, [op_name], [impl_id])
        own = None if samples is None else samples(op_name, dtype, place)
        inputs = Inputs(manager, op_name, dtype, place, seed=seed, samples=own)
        return verify(manager, impl, dtype, place, inputs=inputs, compiled=compiled)

    @pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))
    @pytest.mark.parametrize("op_name", operators or names)
    def test(op_name: str, dtype: torch.dtype) -> None:
        (impl,) = implementations(get_default_manager(), [op_name], [impl_id])
        available, why = impl.availability()
        if not available:
            (pytest.skip if may_be_absent else pytest.fail)(f"{impl_id} is not available: {why}")
        result = found(op_name, dtype)
        if result.prepares:
            text = "%s %s %s ran with prepared weights on %d inputs, with plain ones on %d"
            logger.info(text, op_name, impl_id, result.dtype, result.prepared, result.plain)
        lines = [f"{op_name} {impl_id}", *result.problems, *(f"input: {text}" for text in result.failed.values())]
        assert not result.problems, "\n".join(lines)
        if not result.samples:
            text = f"{impl_id} takes none of the inputs of {op_name} in {result.dtype}"
            others = any(found(op_name, other).samples for other in dtypes)
            (pytest.skip if others else pytest.fail)(text)

    return test
