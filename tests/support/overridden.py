"""Names of a host that a plugin's classes override, compared with the plugin's facts."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature, signature
from types import ModuleType
from typing import Any

from fl_dispatch.hosting.facts.fact import HostFact

EVERY_CLASS = {
    *("__module__", "__doc__", "__init__", "__annotations__", "__parameters__", "__orig_bases__", "__call__", "__eq__"),
    *("__abstractmethods__", "_abc_impl", "__dict__", "__weakref__", "__hash__", "__repr__", "__match_args__"),
    *("__dataclass_fields__", "__dataclass_params__"),
}
"""Names that every class has, or that Python makes."""


def overridden(plugin: ModuleType, host: str, left_out: Sequence[str] = ()) -> Iterator[tuple[type, str, Any]]:
    """Yield each class of the plugin, a name that it overrides, and the plugin's value.

    Args:
        plugin: its package.
        host: the host's package.
        left_out: parts of names of modules that cannot be imported here or that are for other versions.
    """
    for found in pkgutil.walk_packages(plugin.__path__, f"{plugin.__name__}."):
        if any(part in found.name for part in left_out):
            continue
        for ours in vars(importlib.import_module(found.name)).values():
            if isinstance(ours, type) and ours.__module__ == found.name:
                bases = [base for base in ours.__mro__ if base.__module__.startswith(f"{host}.")]
                for name, value in vars(ours).items():
                    if any(name in vars(base) for base in bases) and name not in EVERY_CLASS:
                        yield ours, name, value


def listed(facts: Sequence[HostFact], version: str) -> dict[tuple[type, str], str]:
    """Return (class of the host, overridden name) → the name with its parameters, as facts say."""
    found = {}
    for fact in facts:
        module, _, name = fact.owner.partition(":")
        owner = getattr(sys.modules.get(module), name, None)
        if fact.verb == "overrides" and fact.concerns(version) and owner is not None:
            found |= {(owner, plain): call for plain, call in zip(fact.plain_names, fact.names, strict=True)}
    return found


def assert_listed(facts: Sequence[HostFact], names: Sequence[tuple[type, str, Any]], version: str) -> int:
    """Find each name in the facts and bind its arguments as they say; return the number of bound methods.

    A name that is in no fact could be renamed by the host: it would no longer be called, and no check would report it.
    """
    known, compared = listed(facts, version), 0
    calls = {
        (ours, name): {known[base, name] for base in ours.__mro__ if (base, name) in known} for ours, name, _ in names
    }
    assert {(ours.__name__, name) for (ours, name), found in calls.items() if not found} == set()
    for ours, name, value in names:
        for call in calls[ours, name]:
            if "(" in call:
                (table,) = ast.parse(f"def {call}: ...").body
                assert isinstance(table, ast.FunctionDef)
                own = list(signature(getattr(value, "__func__", value)).parameters.values())
                taken = Signature(own if isinstance(value, staticmethod) else own[1:])
                positional, named = table.args.args, dict.fromkeys(arg.arg for arg in table.args.kwonlyargs)
                taken.bind(*positional[: len(positional) - len(table.args.defaults)], **named)
                taken.bind(*positional, **named)
                if table.args.vararg is not None or table.args.kwarg is not None:
                    assert {parameter.kind for parameter in own} & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}, (
                        name
                    )
                compared += 1
    return compared
