"""The ends of the last transfers, so that a late message about one is understood."""

from __future__ import annotations

from collections import OrderedDict

LAST = 4096


class Remembered(OrderedDict[str, str]):
    """Transfer → why it ended; the oldest are forgotten."""

    def __setitem__(self, transfer: str, why: str) -> None:
        super().__setitem__(transfer, why)
        while len(self) > LAST:
            self.popitem(last=False)
