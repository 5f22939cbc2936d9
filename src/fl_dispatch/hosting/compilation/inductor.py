"""Models that Inductor compiles to C++: whether it can compile here, and the operators with references to fuse."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

from ... import get_default_manager, get_policy
from ...settings.selection_policy import PREFER_DEFAULT


def missing_for_cpp() -> str | None:
    """Return what Inductor lacks here to build C++, or ``None``."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++, or the one that the environment variable CXX names)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"Python's C headers ({header})"


def fused(operators: Iterable[str]) -> list[str]:
    """Return the operators that should run as their fused reference in a model compiled under the policy in force.

    All their first choices are slower than the reference. The user's orders take precedence: rules for an operator, and
    a preference. The default preference in a platform's file, as in the files of ``fl tune``, does not count.
    """
    policy, manager = get_policy(), get_default_manager()
    preference = policy.origin("prefer")
    if not (preference.shipped or (preference.platform and policy.prefer == PREFER_DEFAULT)):
        return []
    ruled = {key.partition("@")[0] for key, _ in (*policy.per_op_order, *policy.op_tuned)}
    firsts = {op: manager.first_choices(op) for op in operators if op not in ruled}
    return [op for op, impls in firsts.items() if impls and not any(impl.traits.inductor for impl in impls)]
