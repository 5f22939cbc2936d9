"""The manifest: the choices of a process with frozen dispatch, as plain data with one hash."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch

from ..aten_replacement import replaced_operators
from ..fixed_choices import Choices, Place, data, in_one_line
from ..ops import OPERATORS, Mode, Operator
from ..selection.decision import Decision
from ..types import OpImpl
from ..version import __version__
from .variants import schema, variants


@dataclass(frozen=True)
class Manifest:
    """The choices of a process with frozen dispatch.

    Args:
        choices: operator → its choices as plain data, conditional ones first; and ``operator@scope`` for each layer
            with choices of its own.
        reasons: the same keys → why.
        versions: package → version: torch, this package, and the packages of the implementations.
        aten: PyTorch's operator → the function that replaces it, see :mod:`fl_dispatch.aten_replacement`.
        untraceable: ``operator: implementation`` → why Dynamo cannot trace it, as declared or found in a trial, so that
            compiled code calls its view.
        whole: operators that compiled code calls by their views, because a host joins their calls.
        views: operator → its modes, and the names and schemas of its opaque views, which compiled code may contain.
        tactics: autotuned kernel → key, sizes and dtypes → the chosen configuration. A host adds them when kernels are
            warm, after compiled code got its cache key.
        hash: over all of these except reasons and tactics; equal in processes with the same choices.
    """

    choices: Mapping[str, list[dict[str, Any]]]
    reasons: Mapping[str, str]
    versions: Mapping[str, str]
    aten: Mapping[str, str] = field(default_factory=dict)
    untraceable: Mapping[str, str] = field(default_factory=dict)
    whole: Sequence[str] = ()
    views: Mapping[str, str] = field(default_factory=dict)
    tactics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        parts: dict[str, Any] = {
            "choices": dict(self.choices),
            "versions": dict(self.versions),
            "aten": dict(self.aten),
            "untraceable": sorted(self.untraceable),  # Dynamo's reasons may name an address
            "whole": list(self.whole),
            "views": dict(self.views),
        }
        text = json.dumps(parts, sort_keys=True)
        object.__setattr__(self, "choices", json.loads(text)["choices"])  # so that it equals one from another process
        object.__setattr__(self, "whole", tuple(self.whole))
        object.__setattr__(self, "hash", hashlib.sha256(text.encode()).hexdigest()[:16])

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest.from_data, (self.as_data(),)  # its mappings are views, which pickle refuses

    def as_data(self) -> dict[str, Any]:
        """Return the manifest as plain data, for other processes and files."""
        return {
            "hash": self.hash,
            "choices": dict(self.choices),
            "reasons": dict(self.reasons),
            "versions": dict(self.versions),
            "aten": dict(self.aten),
            "untraceable": dict(self.untraceable),
            "whole": list(self.whole),
            "views": dict(self.views),
            "tactics": {kernel: dict(choices) for kernel, choices in self.tactics.items()},
        }

    @classmethod
    def from_data(cls, plain: Mapping[str, Any]) -> Manifest:
        """Return the manifest that :meth:`as_data` wrote.

        Raises:
            ValueError: the hash is not that of the choices and versions.
        """
        parts = ("choices", "reasons", "versions", "aten", "untraceable", "whole", "views", "tactics")
        manifest = cls(*(plain[name] for name in parts))
        if plain["hash"] != manifest.hash:
            raise ValueError(
                f"a manifest with the hash {plain['hash']} was changed: its contents hash to {manifest.hash}"
            )
        return manifest

    def differences(self, other: Manifest) -> list[str]:
        """Return one line for each operator, layer and package that differs; empty if the hashes agree."""
        lines = []
        for mine, theirs in (
            (self.choices, other.choices),
            (self.versions, other.versions),
            (self.aten, other.aten),
            (_as_words(self.untraceable), _as_words(other.untraceable)),
            (dict.fromkeys(self.whole, "called whole"), dict.fromkeys(other.whole, "called whole")),
            (self.views, other.views),
        ):
            for key in sorted({*mine, *theirs}):
                one, two = mine.get(key), theirs.get(key)
                if one != two:
                    lines.append(f"{key}: {in_one_line(one)} here, {in_one_line(two)} there")
        return lines


def manifest_of(
    decided: Mapping[Place, Decision],
    choices: Mapping[Place, Choices],
    obstacle: Callable[[OpImpl], str | None],
    whole: Iterable[str] = (),
) -> Manifest:
    """Return the manifest of the decisions for each operator and layer, and the resulting choices.

    Args:
        obstacle: an implementation → why Dynamo cannot trace it; empty if it can, ``None`` if that is unknown.
    """
    named: dict[str, list[dict[str, Any]]] = {}
    reasons: dict[str, str] = {}
    for (op_name, scope), made in sorted(choices.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        if scope and data(made) == data(choices.get((op_name, None), ())):
            continue
        key = f"{op_name}@{scope}" if scope else op_name
        decision = decided[op_name, scope]
        named[key] = data(made)
        reasons[key] = decision.considered[0].reason if decision.chosen else "no implementation can run"
    impls = {impl for made in choices.values() for choice in made for impl in choice.runs}
    versions = MappingProxyType(_versions(impls))
    opaque = dict(sorted((f"{impl.op_name}: {impl.impl_id}", why) for impl in impls if (why := obstacle(impl))))
    views = {name: _views(OPERATORS[name]) for name, _ in choices if name in OPERATORS}
    named_whole = tuple(sorted(whole))
    return Manifest(
        MappingProxyType(named), MappingProxyType(reasons), versions, replaced_operators(), opaque, named_whole, views
    )


def _views(operator: Operator) -> str:
    """Return an operator's modes, and the names and schemas of its views."""
    views = variants(operator) if Mode.OPAQUE in operator.modes else ()
    modes = sorted(mode.value for mode in operator.modes)
    return "; ".join([*modes, *(f"{variant.name}{schema(operator, variant)}" for variant in views)])


def _as_words(untraceable: Mapping[str, str]) -> dict[str, str]:
    """Return ``untraceable`` with one word for all reasons, because Dynamo's may name an address."""
    return dict.fromkeys(untraceable, "opaque")


def _versions(impls: set[OpImpl]) -> dict[str, str]:
    """Return the versions of the packages with these implementations: package → version."""
    versions = {"fl_dispatch": __version__, "torch": str(torch.__version__)}
    distributions = metadata.packages_distributions()
    roots = {function.partition(".")[0] for function in replaced_operators().values()}
    for impl in impls:
        fn = inspect.unwrap(impl.fn)
        fn = fn.func if isinstance(fn, functools.partial) else fn
        roots.add(str(getattr(fn, "__module__", None) or type(fn).__module__).partition(".")[0])
    for root in roots:
        if root not in versions:
            names = sorted(set(distributions.get(root, ())))
            versions[root] = ", ".join(f"{name} {metadata.version(name)}" for name in names) or "unknown"
    return dict(sorted(versions.items()))
