"""Facts about recent transfers, so that late messages about them are understood."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

LAST = 4096
T = TypeVar("T")


class BoundedDict(OrderedDict[str, T]):
    """Transfer → a fact about it, such as why it ended; the oldest are forgotten."""

    def __setitem__(self, transfer: str, known: T) -> None:
        super().__setitem__(transfer, known)
        while len(self) > LAST:
            self.popitem(last=False)
