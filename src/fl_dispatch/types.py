"""Implementations, and the tokens by which policies name them."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .errors import text_of
from .importing import NOT_YET, is_of_incomplete_module


class BackendImplKind(enum.Enum):
    """Origin of an implementation. The value is the token that selects the kind."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"

    def __str__(self) -> str:
        return self.value


class BackendPriority(enum.IntEnum):
    """Priority of an implementation among those that match the same token; higher is preferred."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


_DEFAULT_PRIORITY = {
    BackendImplKind.DEFAULT: BackendPriority.DEFAULT,
    BackendImplKind.VENDOR: BackendPriority.VENDOR,
    BackendImplKind.REFERENCE: BackendPriority.REFERENCE,
}


@dataclass(frozen=True, eq=False)
class Traits(Mapping[str, Any]):
    """Facts about an implementation that policies and hosts read; as a mapping, those given or not at their defaults.

    Args:
        batch_invariant: whether a row of its result has the same bits in every batch.
        only_batch_invariant: admitted only if the policy asks for batch invariance.
        only_by_name: chosen only by its id, for example because it compiles kernels while requests wait.
        graphs: a graph can hold its calls; false if it reads a batch's sizes as integers, or waits for the device.
        deterministic: the same arguments give the same result.
        inductor: ``False`` if the reference is faster because Inductor fuses it with surrounding code.
        reference_from: the number of tokens from which on the implementation calls the reference.
        chunk: tokens for which a scan keeps two states in float32 while it runs.
        kv_layout: the layout of the KV cache with which it is fastest; it runs with the others, too.
        kv_block: slots in a block of the KV cache from which on it is fastest.
        extra: a vendor's own facts.
        stated: traits that :meth:`of` was given; the mapping shows them even at their defaults.
    """

    batch_invariant: bool = False
    only_batch_invariant: bool = False
    only_by_name: bool = False
    graphs: bool = True
    deterministic: bool = True
    inductor: bool = True
    reference_from: int | None = None
    chunk: int | None = None
    kv_layout: str | None = None
    kv_block: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    stated: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        if known := next((key for key in self.extra if key in TRAITS), None):
            raise TypeError(f"'{known}' is a trait of its own and does not belong in extra")

    @staticmethod
    def of(properties: Mapping[str, Any]) -> Traits:
        """Make traits from a mapping of their names; other keys become ``extra``."""
        if isinstance(properties, Traits):
            return properties
        known = {key: value for key, value in properties.items() if key in TRAITS}
        extra = {key: value for key, value in properties.items() if key not in TRAITS}
        return Traits(**known, extra=extra, stated=frozenset(known))

    def __getitem__(self, key: str) -> Any:
        if key not in TRAITS:
            return self.extra[key]
        if not self._lists(key):
            raise KeyError(key)
        return getattr(self, key)

    def _lists(self, key: str) -> bool:
        return key in self.stated or getattr(self, key) != TRAITS[key]

    def __iter__(self) -> Iterator[str]:
        yield from filter(self._lists, TRAITS)
        yield from self.extra

    def __len__(self) -> int:
        return sum(1 for _ in self)


TRAITS: Mapping[str, Any] = {each.name: each.default for each in fields(Traits) if each.name not in ("extra", "stated")}
"""The names of traits, with their defaults."""


def __getattr__(name: str) -> str:
    """Return the name of a trait as a constant, such as ``GRAPHS``, for packages that import it."""
    if name.isupper() and name.lower() in TRAITS:
        return name.lower()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, eq=False)
class OpImpl:
    """One implementation of one operator.

    Args:
        op_name: the operator, such as ``rms_norm``.
        impl_id: unique among the operator's implementations: ``default.flagos``, ``vendor.<name>[.<variant>]``,
            ``reference.torch``.
        kind: where it comes from.
        fn: the implementation. Its parameters are those of the operator's declaration (optional ones may be left out),
            or, if the first one is named ``obj``, the declaration's layer form.
        vendor: the vendor's name; required for ``VENDOR``, and only there.
        priority: higher comes first among implementations that match the same token; ``None`` takes the kind's.
        supports: called with the arguments that its parameters name, or with all of them, see
            :func:`fl_dispatch.ops.named.names_of`; ``True``, ``False``, or a string that says why not.
        available: whether it can run on this machine. ``None`` asks ``fn``: the backend object of a bound method
            (``is_available()``), or a function attribute ``_is_available``. Must not create a device context.
        properties: its :class:`Traits`, or a mapping of their names, such as ``{"batch_invariant": True}``. Other keys
            are a vendor's own; one that almost is a trait's name is a WARNING at registration.
        requires: facts that it needs about the process, such as ``{"kv_layout": "NHD"}``. The host states facts at
            start; a fact that differs skips the implementation, so operators with a common layout are chosen together.
        device_types: the PyTorch device types of tensors that it takes; ``None`` for any. If this machine's device is
            not among them, every call checks the leading tensor. If it is, the fast path does not check, so the
            implementation must raise ``NotSupported`` for tensors on other devices. Another candidate then runs, but
            the error is raised while dispatch is frozen.
        signature: ``"checked"``, or ``"unchecked"`` for a callable with parameters that cannot be inspected.
        opaque: Dynamo cannot trace it, so compiled code calls it behind a ``torch.library`` operator; with ``False`` it
            can. ``None`` runs a trial when compiled code first needs it.

    Raises:
        ValueError: a vendor is missing, or given for another kind.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int | None = None
    supports: Callable[..., bool | str] | None = None
    available: Callable[[], bool] | None = None
    properties: Mapping[str, Any] = field(default_factory=Traits)
    requires: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    device_types: tuple[str, ...] | None = None
    signature: str = "checked"
    opaque: bool | None = None

    def __post_init__(self) -> None:
        for name in ("op_name", "impl_id"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or value != value.strip():
                raise ValueError(f"OpImpl {name} must be a non-empty string, not {value!r}")
        if {*self.op_name} & {*"@: \t\n"}:
            raise ValueError(f"OpImpl op_name must hold no '@', ':' or blank: {self.op_name!r}")
        self._check_types()
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise ValueError(f"VENDOR implementation {self.impl_id} of '{self.op_name}' must specify vendor name")
        if self.kind is not BackendImplKind.VENDOR and self.vendor:
            raise ValueError(f"{self.impl_id} of '{self.op_name}': only VENDOR implementations have a vendor")
        if self.signature not in ("checked", "unchecked"):
            raise ValueError(f"{self.impl_id}: signature must be 'checked' or 'unchecked', not {self.signature!r}")
        if self.opaque not in (True, False, None):
            raise ValueError(f"{self.impl_id}: opaque must be True, False or None, not {self.opaque!r}")
        if self.priority is None:
            object.__setattr__(self, "priority", int(_DEFAULT_PRIORITY[self.kind]))
        object.__setattr__(self, "properties", Traits.of(self.properties))

    def _check_types(self) -> None:
        """Check the types of fields, because a wrong one would only show when policies are compared."""
        optional = "callable, or None"
        rules: tuple[tuple[str, bool, str], ...] = (
            ("fn", callable(self.fn), "callable"),
            ("kind", isinstance(self.kind, BackendImplKind), "a BackendImplKind"),
            ("vendor", self.vendor is None or isinstance(self.vendor, str), "a string, or None"),
            ("priority", self.priority is None or type(self.priority) in (int, BackendPriority), "an integer, or None"),
            ("supports", self.supports is None or callable(self.supports), optional),
            ("available", self.available is None or callable(self.available), optional),
            ("properties", isinstance(self.properties, Mapping), "a mapping"),
            ("requires", _holds_facts(self.requires), "a mapping of names to hashable values"),
            (
                "device_types",
                self.device_types is None
                or (isinstance(self.device_types, tuple) and all(isinstance(kind, str) for kind in self.device_types)),
                "a tuple of strings, or None",
            ),
        )
        for name, fits, needed in rules:
            if not fits:
                value = getattr(self, name)
                raise ValueError(f"OpImpl {self.impl_id} of '{self.op_name}': {name} must be {needed}, not {value!r}")

    @property
    def traits(self) -> Traits:
        """Return its traits."""
        return Traits.of(self.properties)

    @property
    def place(self) -> str:
        """Return where its function is defined, for messages: ``module (file:line)``, or the module alone."""
        fn = inspect.unwrap(getattr(self.fn, "__func__", self.fn))
        code = getattr(fn, "__code__", None)
        module = str(getattr(fn, "__module__", None) or type(fn).__module__)
        return module if code is None else f"{module} ({code.co_filename}:{code.co_firstlineno})"

    @property
    def effective_priority(self) -> int:
        """Return its own priority, or else the kind's."""
        return self.priority if self.priority is not None else 0

    def takes_device(self, device_type: str) -> bool:
        """Whether it takes tensors of a device type; a call without tensors has the type ``none``."""
        return self.device_types is None or device_type == "none" or device_type in self.device_types

    def availability(self) -> tuple[bool, str]:
        """Whether it can run here, and a message why not. A check that raises counts as no."""
        check = self.available
        if check is None:
            check = getattr(self.fn, "_is_available", None)
        if check is None:
            check = getattr(getattr(self.fn, "__self__", None), "is_available", None)
        if check is None:
            return True, ""
        try:
            if check():
                return True, ""
            why = getattr(getattr(check, "__self__", None), "why_unavailable", None)
            return False, (str(why()) if why is not None else "") or "not available on this machine"
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a check may exit, and a panic in a Rust extension is not an Exception
            return False, NOT_YET if is_of_incomplete_module(
                error
            ) else f"its availability check raised {text_of(error)}"

    def is_available(self) -> bool:
        """Whether it can run here; never raises."""
        return self.availability()[0]

    def __str__(self) -> str:
        return f"'{self.impl_id}' (kind={self.kind}, vendor={self.vendor})"


def _holds_facts(requires: object) -> bool:
    try:
        return isinstance(requires, Mapping) and isinstance(hash(tuple(requires.items())), int)
    except TypeError:
        return False


def match_token(impl: OpImpl, token: str) -> bool:
    """Whether a selection token names this implementation.

    Tokens are ``flagos``, ``reference``, ``vendor`` (any), ``vendor:NAME`` and ``impl:IMPL_ID``; an unknown one names
    nothing. The case of vendor names does not matter. Only the last kind of token names an implementation that is
    ``only_by_name``.
    """
    if token.startswith("impl:"):
        return impl.impl_id == token[5:]
    if impl.traits.only_by_name:
        return False
    if token.startswith("vendor:"):
        return impl.vendor is not None and impl.vendor.casefold() == token[7:].casefold()
    return impl.kind.value == token
