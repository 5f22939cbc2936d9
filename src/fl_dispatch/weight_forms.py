"""Forms that implementations prepare from a model's weights, such as repacked copies, kept with the weight.

A host *declares* the tensors that stay from call to call. An implementation with a kernel for another form of a weight
asks :func:`of` for the form, and the first call makes it. The weight stays unchanged for other implementations and for
code that reads or writes it, so a prepared weight takes its memory twice, unless a host moves the pages of the weight
itself to a disk (:mod:`fl_dispatch.hosting.memory.paging`).

A write by any code is noticed, also through another tensor over the same memory, such as ``weight.data``: the weight's
storage is marked as copied on write, and PyTorch removes the mark before it hands out an address to write to. The form
of a weight that was written is rebuilt before its next use.

An owner that got the address before the mark, such as a NumPy array or a DLPack capsule, can write unnoticed. PyTorch
counts the owners of a memory, so a weight is marked only while its memory has one owner. A bare address, kept by an
extension or written to by another machine, has no owner; code that writes there calls :func:`weights_were_written`.

Some readers remove the mark, too, because they request a writable address: code that Inductor compiled for a GPU, and
launchers of Triton kernels. A host that knows a time without writes declares it (:func:`settled`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from .devices import detect_device
from .locking import ForkableLock
from .logger_manager import get_logger

logger = get_logger(__name__)
T = TypeVar("T")

ATTRIBUTE = "fl_prepared"
"""The attribute of a declared weight that has its forms."""
IN_A_ROW = 64
"""Consecutive calls that find a weight written, or its memory shared, after which it is no longer prepared.

A weight that was given up as shared is tried again after the same number of calls or steps."""
SHARED = "a view, a NumPy array or a DLPack capsule shares its memory, and PyTorch may not notice what that writes"
"""Why a weight in shared memory is not marked."""
CALLED_BY_PYTORCH = "fl_dispatch.compiled.views"
"""The module of functions that PyTorch calls, and during which PyTorch owns their tensors, too."""
_unwritten: Callable[[Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda weight: False)
"""Whether writable memory was never requested since a weight was marked."""
_owners: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: ALONE + 1)
_uses: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda weight: 2)
ALONE = 2
"""Owners of the storage of an unshared weight: the weight, and the object that asks. The base of a view is one more."""
_making = ForkableLock()
_in_use = False
_all: weakref.WeakSet[Forms] = weakref.WeakSet()
"""The forms of all declared weights."""


def in_use() -> bool:
    """Whether any weight was ever prepared in this process."""
    return _in_use


class Forms:
    """The forms of one weight.

    ``made`` has each implementation's form, or ``None`` if it has none for this weight; ``makers`` makes them, and
    ``times`` counts how often. Copies and pickles of a weight begin without forms, because a form may be an address.
    Forms that are ``held`` are never given up, because compiled code and graphs keep their addresses. ``settled`` is
    the weight during a time without writes (:func:`settled`). ``shared`` counts consecutive calls that found the
    weight's memory shared.
    """

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.makers: dict[str, Callable[[Tensor, Any], Any]] = {}
        self.times = 0
        self.fresh: set[str] = set()
        self.in_a_row = 0
        self.shared = 0
        self.held = False
        self.settled: Tensor | None = None
        self.given_up = ""
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Forms, ()

    def __deepcopy__(self, memo: Any) -> Forms:
        return Forms()


def declare(weight: Tensor) -> Forms:
    """Declare that a tensor stays from call to call, so that implementations may prepare it. Idempotent.

    Returns:
        The tensor's forms; the host may pass them to :func:`follow` with a tensor that replaces this one.
    """
    forms: Forms | None = getattr(weight, ATTRIBUTE, None)
    if forms is None:
        forms = Forms()
        setattr(weight, ATTRIBUTE, forms)
    return forms


def declare_all(weights: Iterable[Tensor]) -> None:
    """Declare several tensors."""
    for weight in weights:
        declare(weight)


def may_be(weight: Tensor) -> bool:
    """Whether a weight is declared, and was not given up."""
    forms: Forms | None = getattr(weight, ATTRIBUTE, None)
    return forms is not None and not forms.given_up


def rests(weight: Tensor) -> bool:
    """Whether products use a form of a weight that was not written since, so that steps do not read the weight."""
    forms: Forms | None = getattr(weight, ATTRIBUTE, None)
    return forms is not None and any(form is not None for form in forms.made.values()) and _unwritten(weight)


def of(weight: Tensor, name: str, make: Callable[[Tensor, T | None], T | None]) -> T | None:
    """Return an implementation's form of a weight's current value.

    Args:
        weight: as the operator got it.
        name: the implementation's name, unique among those that prepare weights of this operator.
        make: makes the form from a snapshot of the weight. Its second argument is the form before the last write, if
            any, for reuse. Returns ``None`` if this weight has no such form.

    Returns:
        The form, or ``None``: the weight is not declared, it has no such form, or writes to it cannot be noticed now. A
        trace gets the form of the last call outside traces; the host calls :func:`follow` before it runs compiled code.
    """
    forms: Forms | None = getattr(weight, ATTRIBUTE, None)
    if forms is None:
        return None
    if torch.compiler.is_compiling():
        found: T | None = forms.made.get(name)
        return found
    if name in forms.fresh and (forms.settled is weight or _unwritten(weight)):
        forms.in_a_row = 0
        made: T | None = forms.made[name]
        return made
    anew: T | None = _made_anew(weight, forms, name, make)
    return anew


def follow(weight: Tensor, forms: Forms, held: bool = True) -> None:
    """Make all forms again if the weight was written, or if a new tensor replaces the one that had them.

    Args:
        weight: the current weight.
        forms: the forms of the declared weight.
        held: whether compiled code or a captured graph goes on using the forms, so that they must never be given up.
    """
    forms.held |= held
    if getattr(weight, ATTRIBUTE, None) is not forms:
        setattr(weight, ATTRIBUTE, forms)
        forms.fresh.clear()
    elif not forms.made:
        if not _may_be_again(weight, forms):
            return
    elif _unwritten(weight) and len(forms.fresh) == len(forms.made):
        return
    for name, make in [*forms.makers.items()]:
        _made_anew(weight, forms, name, make)


def weights_were_written(weights: Iterable[Tensor] | None = None) -> None:
    """Report that weights were written through a kept address, which PyTorch cannot notice.

    Examples are an extension that keeps ``weight.data_ptr()``, and a NIC or another process that writes to this memory.
    The forms are rebuilt before their next use: in the next call outside a host's step, or at the beginning of the
    next step. A weight that was given up is tried again. Other writes need no report.

    Args:
        weights: the declared tensors that were written; by default all. Undeclared tensors have no forms and are
            ignored.
    """
    found = [*_all] if weights is None else [getattr(weight, ATTRIBUTE, None) for weight in weights]
    with _making:
        for forms in found:
            if forms is not None:
                forms.fresh.clear()
                forms.given_up, forms.in_a_row, forms.shared = "", 0, 0


@contextmanager
def settled(weights: Iterable[tuple[Tensor, Forms]], held: bool = True) -> Iterator[None]:
    """Declare a block, such as an engine's step, that writes none of these weights: it uses their forms unchecked.

    Forms of a weight that was written earlier are rebuilt first; :func:`follow` explains the arguments. A weight that
    lost its mark by the end was only read, so it is marked again and keeps its forms. Nested blocks have no effect.
    """
    begun: list[Forms] = []
    try:
        for weight, forms in weights:
            if forms.settled is None:
                follow(weight, forms, held)
                forms.settled = weight
                begun.append(forms)
        yield
    finally:
        ended = [(forms.settled, forms.fresh) for forms in begun]
        for forms in begun:
            forms.settled = None
        for read, fresh in ended:
            if fresh and read is not None and not _unwritten(read):
                _as_it_is(read)


def _made_anew(weight: Tensor, forms: Forms, name: str, make: Callable[[Tensor, Any], Any]) -> Any:
    global _in_use
    with _making:
        _in_use = True
        if forms.settled is not weight and not _unwritten(weight):
            forms.in_a_row = forms.in_a_row + 1 if forms.fresh else 0
            forms.fresh.clear()
        if name in forms.fresh or (forms.given_up and not _may_be_again(weight, forms)):
            return forms.made.get(name)
        now, why_not = _as_it_is(weight)
        forms.shared = forms.shared + 1 if why_not is SHARED else 0
        held = forms.held and bool(forms.made)
        if held or (why_not is SHARED and forms.settled is weight):
            now = weight.detach() if now is None else now  # rebuilt each time, if writes cannot be seen
            if held and forms.shared == IN_A_ROW:
                logger.warning(
                    "a weight %s %s is prepared anew in every step: %s", tuple(weight.shape), weight.dtype, why_not
                )
        elif why_not is SHARED and forms.shared < IN_A_ROW:
            return None
        elif now is None or forms.in_a_row >= IN_A_ROW:
            forms.given_up = why_not or f"it was found written {IN_A_ROW} calls in a row"
            forms.made.clear()
            forms.fresh.clear()
            logger.info(
                "a weight %s %s is not prepared, so products with it may be slower: %s",
                tuple(weight.shape), weight.dtype, forms.given_up,
            )  # fmt: skip
            return None
        made = make(now, forms.made.get(name))
        forms.times += 1
        if detect_device().captures():
            _say_captured(name)
            return made  # a tensor in a capture has no contents before the graph is replayed
        forms.makers[name] = make
        forms.made[name] = made
        forms.fresh.add(name)
        return made


def _may_be_again(weight: Tensor, forms: Forms) -> bool:
    """Whether to try again a weight that was given up as shared, because its memory has one owner now.

    The check runs once in :data:`IN_A_ROW` calls or steps.
    """
    if forms.given_up is not SHARED:
        return False
    forms.shared += 1
    if forms.shared % IN_A_ROW or _is_shared(weight):
        return False
    forms.given_up, forms.shared = "", 0
    return True


@cache
def _say_captured(name: str) -> None:
    logger.warning(
        "%s prepared a weight while a graph was captured, so the graph prepares it in every replay; a call before the "
        "capture would have prepared it once", name,
    )  # fmt: skip


def _as_it_is(weight: Tensor) -> tuple[Tensor | None, str]:
    """Return a snapshot of a weight that makes PyTorch notice the next write; or ``None``, and why that is impossible.

    Nothing is copied until a kernel requests writable memory of the weight or the snapshot. Kernels that do not declare
    their inputs read-only request it, too.
    """
    if weight.untyped_storage().nbytes() > weight.nbytes:
        return None, "it lies in one memory with other tensors, and the mark is the memory's"
    if _is_shared(weight):
        return None, SHARED
    try:
        snapshot = torch._lazy_clone(weight.detach())
    except RuntimeError as error:
        return None, f"PyTorch cannot tell whether it is written ({str(error).splitlines()[0]})"
    if not _unwritten(weight):
        return None, "PyTorch cannot tell whether it is written"
    return snapshot, ""


def _is_shared(weight: Tensor) -> bool:
    """Whether the weight's memory, or the weight itself, has an owner besides Python's variable."""
    try:
        if _owners(weight.untyped_storage()._cdata) > ALONE + (weight._base is not None):
            return True
    except (RuntimeError, NotImplementedError):  # the tensor has no storage
        return False
    return _uses(weight) > 1 and not _is_called_by_pytorch()


def _is_called_by_pytorch() -> bool:
    """Whether PyTorch made this call, so that it owns the arguments meanwhile."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != CALLED_BY_PYTORCH:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
