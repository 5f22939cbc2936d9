"""Names of ATen operators: the keys that a name selects, and the operators that FlagGems must not replace.

A *key* is an operator with its overload, as FlagGems registers it: ``mm``, ``mm.out``, ``add_.Tensor``. FlagGems' own
lists hold names of Python functions (``mm_out``, ``to_copy``, ``true_divide``), each of which may serve several keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from fl_dispatch.aten_replacement.slot import draws
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings.names import FLAGGEMS_OPERATORS, known_operators

logger = get_logger(__name__)

Table = Mapping[str, str]
"""Key → name of the function that FlagGems registers for it."""

RELATIVES: Mapping[str, tuple[str, ...]] = {"mm": ("addmm",), "bmm": ("baddbmm",), "mv": ("addmv",)}
"""Products with a bias: a user who excludes a product also wants it excluded from linear layers with a bias."""

_RANDOM_REASON = "its random numbers are not PyTorch's: a seed means something else, and captured graphs repeat them"


def why_refused(key: str) -> str:
    """Return why an operator is never replaced, even if a list names it; empty for other operators."""
    return _RANDOM_REASON if draws(key) else ""


def expand(name: str, table: Table) -> set[str]:
    """Return the keys that a name selects; empty if FlagGems has none.

    ``mm.out`` selects exactly that key, and ``mm.default`` the key ``mm``. A name without an overload selects every
    overload of the operator, also in place (``add``: ``add.Tensor``, ``add_.Tensor``), and ignores a leading underscore
    (``softmax``: ``_softmax``). It also selects the other keys of the same FlagGems functions (``div``:
    ``true_divide.*``) and :data:`RELATIVES`. A name that ends in ``_`` selects the operator in place only. The report's
    form ``aten::mm`` means ``mm``.
    """
    name = name.removeprefix("aten::")
    if "." in name:
        exact = name.removesuffix(".default")
        return {exact} & table.keys()
    found = {key for key in table if _means(name, key)}
    functions = {table[key] for key in found} | ({name} & set(table.values()))
    found |= {key for key, function in table.items() if function in functions}
    return found.union(*(expand(other, table) for other in RELATIVES.get(name, ())))


def aten_names(names: Iterable[str]) -> list[str]:
    """Return the names that are not declared operators, sorted: a list for FlagGems may hold both kinds."""
    ours = set(known_operators()) | set(FLAGGEMS_OPERATORS) - {"to_copy"}
    return sorted(set(names) - ours)


def expand_all(names: Iterable[str], table: Table, source: str, *, deny: bool = False) -> set[str]:
    """Return the keys that a list selects; a name unknown to FlagGems logs a WARNING with the nearest name.

    Args:
        names: the user's list. In a white-list ``rms_norm`` is the declared operator, not ATen's of the same name.
        table: FlagGems' table.
        source: where the list came from, for the WARNING.
        deny: whether the list is a blacklist, which also covers ATen's operators of such names.
    """
    found: set[str] = set().union(*(expand(name, table) for name in names)) if deny else set()
    for name in aten_names(names):
        keys = expand(name, table)
        if not keys:
            known = sorted({*table, *table.values(), *(_base(key) for key in table)})
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else ""
            logger.warning("%s: FlagGems replaces no ATen operator '%s'%s", source, name, hint)
        found |= keys
    return found


def functions_of(keys: Collection[str], table: Table) -> list[str]:
    """Return the functions that serve these keys, and possibly others, for FlagGems' ``only_enable(include=)``."""
    return sorted({table[key] for key in keys})


def functions_without(keys: Collection[str], table: Table) -> list[str]:
    """Return the functions that serve none of these keys, for FlagGems' ``enable(unused=)``."""
    return sorted(set(table.values()) - set(functions_of(keys, table)))


def _base(key: str) -> str:
    return key.partition(".")[0]


def _means(name: str, key: str) -> bool:
    base = _base(key)
    bare = base if base.startswith("__") else base.removeprefix("_")
    return name in (base, bare) or (not name.endswith("_") and name in (base.rstrip("_"), bare.rstrip("_")))
