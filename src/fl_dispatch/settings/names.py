"""Known names, and near misses of them that a user may have meant."""

from __future__ import annotations

import difflib
import functools
import pkgutil
import re
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fl_dispatch.logger_manager import get_logger

from .place import Place, shorten, show

logger = get_logger(__name__)

_layers: dict[str, frozenset[str]] = {}
"""Host → its layer classes, as its plugin registered them."""

FLAGGEMS_OPERATORS = (
    "apply_rotary_pos_emb", "concat_and_cache_mla", "cutlass_scaled_mm", "dreglu", "flash_mla", "fused_add_rms_norm",
    "geglu", "gelu_and_mul", "moe_align_block_size", "reglu", "reshape_and_cache",
    "reshape_and_cache_flash", "silu_and_mul", "skip_layer_norm", "swiglu", "to_copy", "topk_softmax",
)  # fmt: skip
"""Operators of FlagGems that ATen lacks. The list only keeps these names from counting as typing errors."""

VENDOR_ALIASES = {
    "nvidia": "cuda", "huawei": "ascend", "rocm": "amd", "moorethreads": "mthreads", "moore-threads": "mthreads",
    "baidu": "kunlunxin", "alibaba": "thead", "t-head": "thead",
}  # fmt: skip
"""Names that users write for a vendor, its companies and software → the vendor's name in this package."""


def register_layers(host: str, names: Iterable[str]) -> None:
    """Register a host's layer classes as valid names. The plugin calls this before settings are read."""
    _layers[host] = frozenset(names)


@functools.cache
def vendors() -> tuple[str, ...]:
    """Return the vendors that this package knows: folders of ``backends/vendor``, and platforms with settings here.

    A platform's backend may be in its vendor's package.
    """
    from fl_dispatch.settings.platforms import list_platforms

    vendor = Path(__file__).parents[1] / "backends" / "vendor"
    folders = {found.name for found in pkgutil.iter_modules([str(vendor)]) if found.ispkg}
    return tuple(sorted(folders | {platform.partition("-")[0] for platform in list_platforms()}))


def known_operators() -> tuple[str, ...]:
    """Return the declared operators."""
    from fl_dispatch.ops import OPERATORS

    return tuple(OPERATORS)


ALIKE = 0.77
"""How similar a name must be to another project's name of an operator."""


def suggestion(name: str, others: Iterable[str] = (), cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown operator: the one probably meant, or an empty string.

    Args:
        name: the text as written, such as ``RMSNorm`` or ``swiglu``.
        others: registered operators without a declaration.
        cutoff: how similar two names must be, at most 1.
    """
    from fl_dispatch.ops import OPERATORS

    written = _squeezed(name)
    aliases = {_squeezed(alias): op.name for op in OPERATORS.values() for alias in op.aliases}
    meant = {near: aliases[near] for near in difflib.get_close_matches(written, aliases, 3, max(cutoff, ALIKE))}
    meant |= {_squeezed(known): known for known in (*OPERATORS, *others)}
    close = difflib.get_close_matches(written, meant, 1, cutoff)
    found = meant[close[0]] if close else name
    return "" if found == name else f"; did you mean '{found}'?"


def _squeezed(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that lists the valid names, the most similar one first."""
    valid = sorted(known)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return (f"did you mean {close[0]}? " if close else "") + f"valid: {', '.join(valid)}"


def near_miss(name: str, known: Iterable[str], cutoff: float = 0.8) -> str | None:
    """Return the known name that was probably meant.

    A known name with more words (``paged_attention_v2``, ``RMSNormGated``) is not a near miss.
    """
    return _near_miss(name, tuple(known), cutoff)


@functools.lru_cache(maxsize=4096)  # every check of the settings asks about each variable of the environment
def _near_miss(name: str, known: tuple[str, ...], cutoff: float) -> str | None:
    spelled = {other.casefold(): other for other in known}
    folded = name.casefold()
    if spelled.get(folded) == name:
        return None
    if folded in spelled:
        return spelled[folded]
    close = difflib.get_close_matches(folded, spelled, n=3, cutoff=cutoff) or _swapped(folded, spelled)
    if not close or any(_words(spelled[other]) < _words(name) for other in close):
        return None
    return spelled[close[0]]


def check_operator(name: str, place: Place) -> None:
    """Check an operator's name, which may have a scope.

    Raises:
        ConfigError: the name is a near miss of a declared operator.
    """
    _check("operator", name.partition("@")[0], known_operators(), FLAGGEMS_OPERATORS, place)


def check_vendor(name: str, place: Place) -> None:
    """Check a vendor's name, ignoring case.

    Raises:
        ConfigError: the name is a near miss or an alias of this package's vendor, or a near miss of an installed
            plugin.
    """
    if name.casefold() in vendors():
        return
    plugins = _plugins(tuple(sys.path))
    if name.casefold() not in map(str.casefold, plugins):
        if (meant := VENDOR_ALIASES.get(name.casefold())) is not None:
            raise place.error(f"unknown vendor {show(name)}; did you mean {meant}?")
        _check("vendor", name, (*vendors(), *plugins), (), place)


def check_layer(name: str, place: Place) -> None:
    """Check the name of an operator or of a host's layer class.

    Without a host's plugin in the process, names of classes cannot be checked; they have capital letters, operators
    none.

    Raises:
        ConfigError: the name is a near miss of one.
    """
    if not _layers and name != name.lower():
        return
    classes = frozenset[str]().union(*_layers.values())
    meant = (*FLAGGEMS_OPERATORS, name) if _is_aten(name) else FLAGGEMS_OPERATORS
    _check("operator or layer class", name, (*known_operators(), *classes), meant, place)


def check_flagos_operator(name: str, place: Place) -> None:
    """Check a name of FlagGems: a declared operator, or any ATen operator (``mm``, ``mm.out``, ``to_copy``).

    Raises:
        ConfigError: the name is a near miss of a declared operator, and not an ATen operator.
    """
    if not _is_aten(name.partition(".")[0]):
        _refuse_near_miss("operator", name, known_operators(), FLAGGEMS_OPERATORS, place)


def check_aten_overload(name: str, place: Place) -> None:
    """Check one overload of an ATen operator, ``aten::cumsum.out`` or ``cumsum.out``; ``cumsum`` is the default one.

    Raises:
        ConfigError: this PyTorch has no such overload.
    """
    import torch

    base, dot, overload = name.removeprefix("aten::").partition(".")
    known: Any = getattr(torch.ops.aten, base, None) if base.isidentifier() else None
    known = known if isinstance(known, torch._ops.OpOverloadPacket) else None
    if name != "*" and (known is None or (overload if dot else "default") not in known.overloads()):
        written = "" if known is None else f"; {base} has {', '.join(sorted(known.overloads()))}"
        raise place.error(f"PyTorch has no operator {show(name)}{written}")


def _check(kind: str, name: str, known: tuple[str, ...], others: tuple[str, ...], place: Place) -> None:
    if name in known:
        return
    _refuse_near_miss(kind, name, known, others, place)
    names = shorten(", ".join(sorted(known)), 300)
    logger.warning("%s: %s: unknown %s %s; known: %s", place.source, place.key, kind, show(name), names)


def _refuse_near_miss(kind: str, name: str, known: tuple[str, ...], others: tuple[str, ...], place: Place) -> None:
    meant = None if name in others else near_miss(name, known)
    if meant is not None:
        raise place.error(f"unknown {kind} {show(name)}; did you mean {meant}?")


@functools.lru_cache(maxsize=1)
def _plugins(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the plugins installed along the import path; the lookup reads a file of every installed package."""
    return tuple(point.name for point in entry_points(group="vllm_fl.plugin"))


def _is_aten(name: str) -> bool:
    import torch

    return name.isidentifier() and (hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, "_" + name))


def _swapped(name: str, known: Iterable[str]) -> list[str]:
    """Return known names with two neighbouring letters swapped, which difflib finds too far apart."""
    swaps = {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(min(len(name), 40) - 1)}
    return [other for other in known if other in swaps]


def _words(name: str) -> set[str]:
    return {word.casefold() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}
