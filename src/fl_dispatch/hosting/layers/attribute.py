"""An attribute that a plugin keeps on an object of its host's; it has one type."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Attached(Generic[T]):
    """An attribute of a host's objects that is ours.

    It goes around ``__setattr__``, because a module would take a module that it is given for a part of itself.

    Args:
        name: the attribute's, which begins with ``fl_``: it stands beside names of the host's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def give(self, owner: Any, value: T) -> None:
        """Keep a value on an object, in the place of an earlier one."""
        vars(owner)[self.name] = value

    def find(self, owner: Any) -> T | None:
        """The value that an object keeps, or ``None``."""
        found: T | None = vars(owner).get(self.name)
        return found

    def of(self, owner: Any) -> T:
        """The value that an object keeps.

        Raises:
            AttributeError: it keeps nothing.
        """
        try:
            found: T = vars(owner)[self.name]
        except KeyError:
            raise AttributeError(f"{type(owner).__name__} was given no {self.name}") from None
        return found
