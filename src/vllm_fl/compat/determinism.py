"""vLLM's own ways to batch invariance, where this platform is not one that vLLM thinks of."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from fl_dispatch import ConfigError, get_policy

PLACES = ("vllm.model_executor.determinism", "vllm.model_executor.layers")
"""Packages that hold the module, newest first."""


def choose_blas() -> None:
    """Have products by cuBLASLt on NVIDIA GPUs, as vLLM does for its own platform.

    It asks for sums that are not divided, which no other library of PyTorch's has: the first product would be an error.
    """
    if get_policy().batch_invariant and torch.version.cuda is not None:
        torch.backends.cuda.preferred_blas_library(backend="cublaslt")


@contextmanager
def without_triton() -> Iterator[None]:
    """Leave PyTorch's own operators in place inside, where a worker starts; each row of theirs is summed alone."""
    if not get_policy().batch_invariant:
        yield
        return
    package = next((each for each in PLACES if find_spec(each) and find_spec(f"{each}.batch_invariant")), None)
    if package is None:
        raise ConfigError(
            "environment", "VLLM_BATCH_INVARIANT", f"this vLLM has no module batch_invariant in {' or '.join(PLACES)}"
        )
    module = importlib.import_module(f"{package}.batch_invariant")
    before = module.init_batch_invariance
    module.init_batch_invariance = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.init_batch_invariance = before  # type: ignore[attr-defined]
