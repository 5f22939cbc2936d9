"""Verification inside a vendor's own test suite, in two lines of a test module:

.. code-block:: python

    from fl_dispatch.evidence.pytest_plugin import verified
    test_kernels = verified("vendor.mychip")

One test for each operator and dtype. The module is imported where it is used: no entry point loads it, because that
would import torch in every run of pytest of an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ..devices import detect_device
from ..manager import get_default_manager
from .verify import DTYPES, implementations, verify


def verified(
    impl_id: str,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    operators: Sequence[str] | None = None,
    device: str | None = None,
) -> Callable[..., Any]:
    """A parametrized test that verifies every implementation with this id.

    Args:
        impl_id: such as ``vendor.mychip``. Its backend is found like everywhere: by entry point, or named in
            ``VLLM_FL_PLUGIN_MODULES``.
        dtypes: of the inputs.
        operators: only these; an operator of this list that has no such implementation is a failure.
        device: PyTorch device; this machine's by default.

    Raises:
        DispatchError: nothing has this id.
    """
    names = [impl.op_name for impl in implementations(get_default_manager(), operators, [impl_id])]

    @pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))
    @pytest.mark.parametrize("op_name", operators or names)
    def test(op_name: str, dtype: torch.dtype) -> None:
        manager = get_default_manager()
        (impl,) = implementations(manager, [op_name], [impl_id])
        available, why = impl.availability()
        if not available:
            pytest.skip(f"{impl_id} is not available: {why}")
        result = verify(manager, impl, dtype, torch.device(device or detect_device().torch_type))
        assert not result.problems, "\n".join([f"{op_name} {impl_id}", *result.problems])
        if not result.samples:
            pytest.skip(f"{impl_id} takes none of the inputs of {op_name} in {result.dtype}")

    return test
