"""One call on the careful path, with its arguments in each form that an implementation may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..knowledge.failures import ArgumentKind
from ..ops import OPERATORS, Access
from ..selection.decision import Branch, Decision
from ..signatures import Convention
from ..types import OpImpl
from .layer_form import arguments_of, is_layer_first, stand_in
from .snapshot import mutable_parts


class Call:
    """One call on the careful path, with its arguments in each form that an implementation may take."""

    __slots__ = ("args", "kind", "kwargs", "layer", "op_name", "operator", "scope")

    def __init__(
        self,
        op_name: str,
        scope: str | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        layer: Any = None,
    ) -> None:
        operator = OPERATORS.get(op_name)
        self.op_name, self.operator, self.scope, self.layer = op_name, operator, scope, layer
        if operator is not None:
            args, kwargs = operator.bind(args, kwargs), {}
        self.args, self.kwargs = args, kwargs
        operands = args if operator is None else operator.operands(args)
        self.kind = ArgumentKind.of((*operands, *kwargs.values()), scope)

    @classmethod
    def of(cls, op_name: str, scope: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Make a call from the arguments as the caller wrote them, with or without a layer first.

        Raises:
            TypeError: the arguments do not fit the operator.
        """
        operator = OPERATORS.get(op_name)
        if operator is not None and is_layer_first(operator, args):
            layer = args[0]
            return cls(op_name, scope, (), arguments_of(operator, layer, args[1:], kwargs), layer)
        return cls(op_name, scope, args, kwargs)

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments by name; empty for an undeclared operator."""
        return {} if self.operator is None else dict(zip(self.operator.parameters, self.args, strict=True))

    def run(self, fn: Any, convention: Convention | None) -> Any:
        """Call a function with the arguments in the form that it takes."""
        if self.operator is None or convention is None:
            return fn(*self.args, **self.kwargs)
        values = self.values
        taken = [values[name] for name in convention.takes]
        if not convention.layer_first:
            return fn(*taken)
        layer = stand_in(self.operator, values) if self.layer is None else self.layer
        return fn(layer, *taken)

    def why_declined(self, impl: OpImpl, convention: Convention | None) -> str:
        """Return why an implementation declines these arguments; empty if it takes them.

        Raises:
            Exception: any error of its ``supports``.
        """
        if convention is not None and (name := self.given(convention.left_out)):
            return f"it does not take '{name}'"
        answer = True if impl.supports is None else self._ask(impl.supports, convention)
        if isinstance(answer, str):
            return answer or "it does not support these arguments"
        return "" if answer else "it does not support these arguments"

    def _ask(self, supports: Callable[..., bool | str], convention: Convention | None) -> bool | str:
        if self.operator is None or convention is None:
            return supports(*self.args, **self.kwargs)
        values = self.values
        given = (values[name] for name in convention.operands)
        return supports(*given, **{name: values[name] for name in convention.asked})

    def branch(self, decision: Decision) -> Branch:
        """Return the branch of a decision that this call takes."""
        if not decision.conditional or self.operator is None:
            return decision.branches[-1]
        return decision.branch_for(self.operator.workload(*self.args))

    def given(self, names: Sequence[str]) -> str | None:
        """Return the first of these parameters with a value other than its default in this call."""
        if self.operator is None or not names:
            return None
        values = self.values
        for name in names:
            value, default = values[name], self.operator.parameters[name].default
            if value is not default and (isinstance(value, torch.Tensor) or value != default):
                return name
        return None

    def updated(self) -> list[Any]:
        """Return the tensors to restore before a retry, including outputs that share memory with an input.

        For an undeclared operator, return every mutable object that its arguments reach.
        """
        if self.operator is None:
            return self._reached()
        written = self.operator.written(self.args).values()
        return [
            tensor
            for access, tensor in written
            if access is Access.UPDATE or (access is Access.OUTPUT and self._is_shared(tensor))
        ]

    def holds_state(self) -> bool:
        """Whether the call writes a state that cannot be copied."""
        if self.operator is None:
            return False
        return any(access is Access.STATE for access, _ in self.operator.written(self.args).values())

    def _reached(self) -> list[Any]:
        return mutable_parts((*self.args, *self.kwargs.values()))

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "meta":
            return False
        return any(other is tensor or _share_memory(tensor, other) for other in self._others(tensor))

    def _others(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensors = [part for part in self._reached() if isinstance(part, torch.Tensor)]
        place = next(index for index, other in enumerate(tensors) if other is tensor)
        return tensors[:place] + tensors[place + 1 :]


def _share_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether tensors may share memory, even with different storages (NumPy, DLPack, pinned memory)."""
    try:
        first, second = one.untyped_storage(), two.untyped_storage()
    except NotImplementedError:  # a sparse tensor has no address
        return True
    start, other = first.data_ptr(), second.data_ptr()
    return start == other or (start < other + second.nbytes() and other < start + first.nbytes())
