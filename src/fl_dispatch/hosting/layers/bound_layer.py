"""A layer of a host that runs one of our operators, bound under the prefix by which policies name the layer.

Both plugins derive from :class:`BoundLayer`: vLLM's replacement classes together with a class of the host, SGLang's
bridges alone. Every name begins with ``fl_`` to avoid the host's names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from ... import bind_op
from .layer_kernels import LayerKernel
from .scopes import refuse_partial_rules


@runtime_checkable
class Bindable(Protocol):
    """An object that rebinds its operators when it learns its prefix: a layer, or attention of several operators."""

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operators for the layer with this prefix; ``None`` while it is not known."""


class BoundLayer:
    """A layer with a forward that is one call of an operator."""

    fl_operator: str
    """The operator; an instance sets it if instances run different ones."""
    fl_choices: ClassVar[tuple[str, ...]] = ()
    """All operators, if instances run different ones, or more than one."""
    fl_call: Callable[..., Any]
    """The bound operator."""

    @classmethod
    def fl_operators(cls) -> tuple[str, ...]:
        """Return the operator, or :attr:`fl_choices`."""
        return cls.fl_choices or (cls.fl_operator,)

    @staticmethod
    def fl_scope(prefix: str) -> str:
        """Return the prefix by which policies name the layer that is the model's submodule ``prefix``."""
        return prefix

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operator for the layer with this prefix; ``None`` while it is not known."""
        self.fl_call = bind_op(self.fl_operator, scope)


def bind_for(layer: BoundLayer | LayerKernel, scopes: Sequence[str]) -> None:
    """Bind a layer for its scopes in a model: several if layers share a module.

    Raises:
        ValueError: a rule names only some of the scopes, so it cannot be obeyed.
    """
    refuse_partial_rules(layer.fl_operator, scopes)
    layer.fl_bind(scopes[0])
