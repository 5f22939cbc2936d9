"""An implementation called as in a compiled model: dispatched inside ``torch.compile``."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from ..manager import call_op
from ..policy import policy_context
from ..settings.selection_policy import SelectionPolicy
from ..types import OpImpl


def backends() -> list[str]:
    """Return the backends of ``torch.compile`` that work here.

    ``eager`` needs only Dynamo, ``inductor`` also a compiler.
    Inductor compiles with the C++ compiler that the variable ``CXX`` names, else with ``g++`` or ``clang++``.
    """
    found = any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
    return ["eager", "inductor"] if found else ["eager"]


def compiled_function(impl: OpImpl, backend: str) -> Callable[..., Any]:
    """Return a function that calls one implementation of the process's manager in compiled code, in one graph.

    As in a served model, Dynamo traces into the implementation, or into its opaque view. Another implementation cannot
    take over, because the policy names only this one and is strict.
    """
    op_name = impl.op_name
    policy = SelectionPolicy.from_dict(strict=True, per_op_order={op_name: [f"impl:{impl.impl_id}"]})
    torch._dynamo.reset()
    function = torch.compile(lambda *args: call_op(op_name, *args), fullgraph=True, backend=backend, dynamic=False)

    def call(*args: Any) -> Any:
        with policy_context(policy), torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            return function(*args)

    return call
