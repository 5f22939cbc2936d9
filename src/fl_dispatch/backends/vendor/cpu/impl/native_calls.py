"""Calls of this project's C++: a structure of arguments, and a function that gets its address."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from fl_dispatch import cpp


def structure(addresses: str, numbers: str, floats: str = "") -> type[ctypes.Structure]:
    """Return a structure's type; its fields, named here in order, are addresses, 64-bit integers and 32-bit floats."""
    kinds = ((addresses, ctypes.c_void_p), (numbers, ctypes.c_int64), (floats, ctypes.c_float))
    return type(
        "Call", (ctypes.Structure,), {"_fields_": [(name, kind) for names, kind in kinds for name in names.split()]}
    )


@cache
def function(source: Path, name: str, numbers: int = 1) -> Any:
    """Return a function that takes the address of a structure and ``numbers`` 64-bit integers, and returns one."""
    found = getattr(cpp.load(source), name)
    found.argtypes, found.restype = [ctypes.c_void_p, *[ctypes.c_int64] * numbers], ctypes.c_int64
    return found
