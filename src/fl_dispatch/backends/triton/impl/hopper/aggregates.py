"""Named groups of a kernel's values, in each version of Triton that has Gluon."""

from typing import Any, TypeVar, dataclass_transform

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate  # 3.6 has no public name for it

T = TypeVar("T")


@gluon.constexpr_function
def _fill(self, *values, **named):
    given = {**dict(zip(self.FIELDS, values)), **named}  # noqa: B905
    for name, kind in self.FIELDS.items():
        setattr(self, name, gl.constexpr(given[name]) if kind is gl.constexpr else given[name])


@dataclass_transform(frozen_default=True)
def aggregate(cls: type[T]) -> type[T]:
    """Make a class of annotated fields an aggregate, with the constructor that Triton 3.6 does not give it.

    A field is a ``gl.tensor`` (a number or pointer counts as one), a ``gl.shared_memory_descriptor``, an aggregate, or
    a ``gl.constexpr``. Values never change: a method returns a new one.
    """
    cls.__init__ = _fill  # type: ignore[method-assign]
    made: Any = _aggregate(cls)
    made.FIELDS = dict(cls.__annotations__)
    return made  # type: ignore[no-any-return]
