"""The layouts of keys and values in a KV cache that implementations may require, as strided views.

An implementation that needs a certain layout declares ``requires={"kv_layout": "HDN/HND"}``. A host then lays out its
cache in this way, and other implementations read and write it through views. A layout is a string. The letters are a
block's axes from the outermost to the innermost: its slots (``N``), the heads (``H``), a head's dimensions (``D``).

=============  =====================================================================================================
``NHD``        one array per block; its ``D`` has a head's key, then its value
``HDN/HND``    one array per block, along the first axis, common to both: the keys' part, then the values'
``(NHD|NHD)``  all keys of the layer, block after block, then all values; no block is in one piece
=============  =====================================================================================================

Any order of the axes is possible in each. ``requires={"kv_block_multiple": 128}`` asks for blocks of 128 slots, or of a
multiple.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from itertools import permutations

from torch import Tensor

from ... import get_default_manager
from ...logger_manager import get_logger
from ...types import OpImpl

logger = get_logger(__name__)

OPERATORS = ("paged_attention", "kv_cache_write")
LAYOUT = "kv_layout"
"""The requirement of a layout; an implementation that is only faster with a layout lists it in its properties."""
MULTIPLE = "kv_block_multiple"
"""The requirement of a block size."""
_ORDERS = "|".join("".join(order) for order in permutations("NHD"))
_GRAMMAR = re.compile(rf"(?P<joint>{_ORDERS})|(?P<open>\()?(?P<keys>{_ORDERS})(?P<mark>[/|])(?P<values>{_ORDERS})\)?")


@dataclass(frozen=True)
class KVLayout:
    """One layout.

    Args:
        name: the name in requirements.
        keys, values: order of the axes.
        whole_blocks: whether a block's keys and values are one piece of memory, so that blocks can be copied.
        joint: whether both are one array.
    """

    name: str
    keys: str
    values: str
    whole_blocks: bool
    joint: bool

    @classmethod
    @cache
    def parse(cls, name: str) -> KVLayout:
        """Parse a layout.

        Raises:
            ValueError: the string is not a layout.
        """
        found = _GRAMMAR.fullmatch(name) if isinstance(name, str) else None
        if found and found["joint"]:
            return cls(name, name, name, True, True)
        if found and found["mark"] == "|" and name == f"({found['keys']}|{found['values']})":
            return cls(name, found["keys"], found["values"], False, False)
        if found and name == f"{found['keys']}/{found['values']}" and found["keys"][0] == found["values"][0] != "D":
            return cls(name, found["keys"], found["values"], True, False)
        raise ValueError(
            f"{name!r} is no layout of a KV cache: it is axes from the outermost to the innermost (N slots, H heads, D "
            "dimensions) such as 'NHD', 'HDN/HND' with one first axis, N or H, or '(NHD|NHD)'"
        )

    def split(self, memory: Tensor, slots: int, heads: int, key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as views ``[blocks, slots, heads, size]`` of a layer's memory.

        Args:
            memory: its first axis is blocks; each block is one piece of ``slots * heads * (key_size + value_size)``
                elements, in any shape.
            slots, heads, key_size, value_size: sizes of a block.

        Raises:
            ValueError: the layout needs all blocks in one piece, but they are separate.
        """
        blocks, rows = memory.shape[0], slots * heads
        block = memory.stride(0)
        if not self.whole_blocks and blocks > 1 and block != rows * (key_size + value_size):
            raise ValueError(f"layout {self.name} needs a layer's blocks in one piece, but they lie {block} apart")
        views = []
        for order, size, other, before in (
            (self.keys, key_size, value_size, 0),
            (self.values, value_size, key_size, key_size),
        ):
            extent = {"N": slots, "H": heads, "D": size + other if self.joint else size}
            stride = {axis: math.prod(extent[inner] for inner in order[at + 1 :]) for at, axis in enumerate(order)}
            apart = block
            if self.joint:
                start = before * stride["D"]
            elif self.whole_blocks:
                first = order[0]
                start = before * rows // extent[first]
                stride[first] += other * rows // extent[first]
            else:
                start, apart = blocks * rows * before, rows * size
            strides = (apart, stride["N"], stride["H"], stride["D"])
            views.append(memory.as_strided((blocks, slots, heads, size), strides, memory.storage_offset() + start))
        return views[0], views[1]


@dataclass(frozen=True)
class Preference:
    """The requirements of the first choices for a cache.

    Args:
        layout: the layout that the first of them requires or prefers, or ``None``.
        multiple: number that must divide a block's slots.
        block: smallest number of slots of a block that is fast, used if the user chose no size.
        optional: whether the layout is only faster, in blocks of a multiple of ``block`` slots.
    """

    layout: KVLayout | None = None
    multiple: int = 1
    block: int = 1
    optional: bool = False


def preference() -> Preference:
    """Return the requirements of the policy's first choices for attention, then for writing.

    A layout that is only faster counts if no first choice requires one. For an operator with conditional rules, the
    first rule with a requirement counts.
    """
    first = _first()
    for how in ("needs", "is faster with"):
        for op, impl in first:
            if not (asked := _asked(impl, how)):
                continue
            try:
                found = _preference_of(impl)
            except ValueError:  # state() logs it, with the implementation that runs instead
                continue
            logger.info("KV cache: '%s' of '%s' %s %s", impl.impl_id, op, how, asked)
            return found
    return Preference()


def _asked(impl: OpImpl, how: str) -> str:
    """Return an implementation's wishes for one kind of cache, in words; empty if it has none."""
    asked = impl.requires if how == "needs" else impl.properties
    return ", ".join(f"{name}={asked[name]}" for name in (LAYOUT, MULTIPLE) if name in asked)


def state(layout: KVLayout, block_size: int) -> None:
    """State the cache's layout to the dispatch core, and log each implementation that therefore does not run.

    Args:
        layout: layout of this process's cache.
        block_size: slots of a block.
    """
    wanted = _first()
    divisors = frozenset(number for number in range(1, block_size + 1) if block_size % number == 0)
    manager = get_default_manager()
    manager.set_facts(**{LAYOUT: layout.name, MULTIPLE: divisors})
    now = {op: manager.explain(op) for op in OPERATORS}
    for op, impl in wanted:
        instead = now[op].first_choices
        if impl not in instead:
            why = _why_unmet(impl) or next(entry.reason for entry in now[op].considered if entry.impl is impl)
            logger.warning("'%s' of '%s' does not run: %s; %s runs", impl.impl_id, op, why, _named(instead))
    for op, other in (OPERATORS, OPERATORS[::-1]):
        mine, theirs = now[op].first_choices, now[other].first_choices
        tied = [impl for impl in mine if LAYOUT in impl.requires]
        if tied and not any(LAYOUT in impl.requires for impl in theirs):
            logger.warning(
                "'%s' of '%s' has the cache laid as %s, and has no partner for '%s': %s runs on that layout",
                tied[0].impl_id,
                op,
                layout.name,
                other,
                _named(theirs),
            )


def _preference_of(impl: OpImpl) -> Preference:
    """Return the requirements of one implementation.

    Raises:
        ValueError: a requirement cannot be met.
    """
    multiple = impl.requires.get(MULTIPLE, 1)
    if type(multiple) is not int or multiple < 1:
        raise ValueError(f"{MULTIPLE} is a whole number above 0, not {multiple!r}")
    wanted = impl.requires.get(LAYOUT, impl.traits.kv_layout)
    layout, block = None if wanted is None else KVLayout.parse(wanted), int(impl.traits.kv_block)
    return Preference(layout, multiple, block, layout is not None and LAYOUT not in impl.requires)


def _why_unmet(impl: OpImpl) -> str:
    """Return why an implementation's requirements cannot be met; empty if they can."""
    try:
        _preference_of(impl)
    except ValueError as error:
        return str(error)
    return ""


def _first() -> list[tuple[str, OpImpl]]:
    """Return the first choices for each operator of the pair."""
    return [(op, impl) for op in OPERATORS for impl in get_default_manager().first_choices(op)]


def _named(impls: list[OpImpl]) -> str:
    return ", ".join(f"'{impl.impl_id}'" for impl in impls) or "nothing"
