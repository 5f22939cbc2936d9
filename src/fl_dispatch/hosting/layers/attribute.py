"""Attributes that a plugin keeps on objects of its host, or replaces there for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Attached(Generic[T]):
    """Our attribute on a host's objects.

    Setting it bypasses ``__setattr__``, because a module would register another module as a submodule.

    Args:
        name: the attribute's name, which begins with ``fl_`` to avoid the host's names.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def give(self, owner: Any, value: T) -> None:
        """Keep a value on an object, replacing an earlier one."""
        vars(owner)[self.name] = value

    def find(self, owner: Any) -> T | None:
        """Return the value that an object keeps, or ``None``."""
        found: T | None = vars(owner).get(self.name)
        return found

    def of(self, owner: Any) -> T:
        """Return the value that an object keeps.

        Raises:
            AttributeError: the object keeps no value.
        """
        try:
            found: T = vars(owner)[self.name]
        except KeyError:
            raise AttributeError(f"{type(owner).__name__} was given no {self.name}") from None
        return found


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object, class or module other attributes in this block."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:  # it was its class's
                delattr(owner, name)
