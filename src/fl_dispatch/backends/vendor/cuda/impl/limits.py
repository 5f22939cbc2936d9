"""Limits on tensors that all compiled operators share."""

from __future__ import annotations

import functools

from fl_dispatch.devices import CUDA

from ... import compiled_by_vllm

problem = functools.partial(compiled_by_vllm.problem, "cuda")
"""Why the operators cannot take a tensor, or an empty string."""


@functools.cache
def capability(index: int) -> int:
    """Return the compute capability of a GPU in the form of vLLM's operators: 90 for 9.0; 0 if unknown."""
    major, minor = CUDA.capability(index) or (0, 0)
    return 10 * major + minor
