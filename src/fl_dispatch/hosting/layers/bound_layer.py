"""A layer of a host that runs one of our operators, bound for the prefix by which policies name the layer.

Both plugins derive from :class:`BoundLayer`: vLLM's replacement classes beside a class of the host's, SGLang's bridges
alone. Every name begins with ``fl_``, because it stands beside names of the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from ... import bind_op
from .scopes import refuse_partial_rules


@runtime_checkable
class Bindable(Protocol):
    """An object that rebinds its operators when it learns its prefix: a layer, or attention of several operators."""

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operators for the layer with this prefix; ``None`` while it is not known."""


class BoundLayer:
    """A layer with a forward that is one call of an operator."""

    fl_operator: str
    """The operator; an instance sets it if each runs one of several."""
    fl_choices: ClassVar[tuple[str, ...]] = ()
    """All operators, if an instance runs one of several, or more than one."""
    fl_call: Callable[..., Any]
    """The bound operator."""

    @classmethod
    def fl_operators(cls) -> tuple[str, ...]:
        """The operator, or :attr:`fl_choices`."""
        return cls.fl_choices or (cls.fl_operator,)

    @staticmethod
    def fl_scope(prefix: str) -> str:
        """The prefix under which policies name the layer that is the model's submodule ``prefix``."""
        return prefix

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operator for the layer with this prefix; ``None`` while it is not known."""
        self.fl_call = bind_op(self.fl_operator, scope)


def bind_for(layer: BoundLayer, prefixes: Sequence[str]) -> None:
    """Bind a layer for the prefixes that it has in a model: several where layers share a module.

    Raises:
        ValueError: a rule names some of them, so it cannot be obeyed.
    """
    scopes = [layer.fl_scope(prefix) for prefix in prefixes]
    refuse_partial_rules(layer.fl_operator, scopes)
    layer.fl_bind(scopes[0])
