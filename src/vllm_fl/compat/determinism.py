"""vLLM's own measures for batch invariance, on platforms that vLLM does not consider."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from fl_dispatch import ConfigError, get_policy
from fl_dispatch.hosting.layers.attribute import replaced

PLACES = ("vllm.model_executor.determinism", "vllm.model_executor.layers")
"""Packages that contain the module, newest first."""


def choose_blas() -> None:
    """Use cuBLASLt for products on NVIDIA GPUs, as vLLM does for its own platform.

    vLLM disables split sums, which PyTorch's other libraries do not support: the first product would raise an error.
    """
    if get_policy().batch_invariant and torch.version.cuda is not None:
        torch.backends.cuda.preferred_blas_library(backend="cublaslt")


@contextmanager
def without_triton() -> Iterator[None]:
    """Keep PyTorch's own operators in this block, where a worker starts, because they sum each row separately."""
    if not get_policy().batch_invariant:
        yield
        return
    package = next((each for each in PLACES if find_spec(each) and find_spec(f"{each}.batch_invariant")), None)
    if package is None:
        raise ConfigError(
            "environment", "VLLM_BATCH_INVARIANT", f"this vLLM has no module batch_invariant in {' or '.join(PLACES)}"
        )
    module = importlib.import_module(f"{package}.batch_invariant")
    with replaced(module, init_batch_invariance=lambda: None):
        yield
