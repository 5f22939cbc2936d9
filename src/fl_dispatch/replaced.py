"""The operators of PyTorch itself that run other kernels in this process: ATen's, where FlagGems replaces them.

Whoever replaces them says so here, so that manifests, reports and the list of operators agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_operators: Mapping[str, str] = MappingProxyType({})  # replaced as a whole


def replaced_operators() -> Mapping[str, str]:
    """``aten::mm.out`` → the function that runs, ``flag_gems.ops.mm.mm_out``; sorted."""
    return _operators


def set_replaced_operators(operators: Mapping[str, str]) -> None:
    """Say what is replaced from now on."""
    global _operators
    _operators = MappingProxyType(dict(sorted(operators.items())))
