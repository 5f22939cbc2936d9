"""Named groups of a kernel's values, for each version of Triton with Gluon."""

from typing import Any, TypeVar, dataclass_transform

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate  # Triton 3.6 has no public name for it

T = TypeVar("T")


@gluon.constexpr_function
def _fill(self, *values, **named):
    given = {**dict(zip(self.FIELDS, values)), **named}  # noqa: B905
    for name, kind in self.FIELDS.items():
        setattr(self, name, gl.constexpr(given[name]) if kind is gl.constexpr else given[name])


@dataclass_transform(frozen_default=True)
def aggregate(cls: type[T]) -> type[T]:
    """Make a class of annotated fields an aggregate, with the constructor that Triton 3.6 lacks.

    A field is a ``gl.tensor`` (also a number or pointer), a ``gl.shared_memory_descriptor``, an aggregate, or a
    ``gl.constexpr``. Values are immutable: a method returns a new one.
    """
    cls.__init__ = _fill  # type: ignore[method-assign]
    made: Any = _aggregate(cls)
    made.FIELDS = dict(cls.__annotations__)
    return made  # type: ignore[no-any-return]
