"""Which names of a host a plugin overrides in its classes, and whether the plugin's table of facts says so."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature, signature
from types import ModuleType
from typing import Any

from fl_dispatch.hosting.host_facts import HostFact

EVERY_CLASS = {
    *("__module__", "__doc__", "__init__", "__annotations__", "__parameters__", "__orig_bases__", "__call__", "__eq__"),
    *("__abstractmethods__", "_abc_impl", "__dict__", "__weakref__", "__hash__", "__repr__", "__match_args__"),
    *("__dataclass_fields__", "__dataclass_params__"),
}
"""Names that every class has, or that Python makes."""


def overridden(plugin: ModuleType, host: str, left_out: Sequence[str] = ()) -> Iterator[tuple[str, type, str, Any]]:
    """``(module below the plugin, our class, name, what ours has)``.

    Args:
        plugin: its package.
        host: the host's package.
        left_out: parts of the names of modules that cannot be imported here, or are for other versions.
    """
    start = f"{plugin.__name__}."
    for found in pkgutil.walk_packages(plugin.__path__, start):
        if any(part in found.name for part in left_out):
            continue
        for ours in vars(importlib.import_module(found.name)).values():
            if isinstance(ours, type) and ours.__module__ == found.name:
                bases = [base for base in ours.__mro__ if base.__module__.startswith(f"{host}.")]
                for name, value in vars(ours).items():
                    if any(name in vars(base) for base in bases) and name not in EVERY_CLASS:
                        yield found.name.removeprefix(start), ours, name, value


def unlisted(facts: Sequence[HostFact], names: Sequence[tuple[str, type, str, Any]]) -> set[tuple[str, str]]:
    """Class and name of what no fact says: if the host renames it, it is called no more, and nothing tells."""
    listed = {(fact.used_by, name) for fact in facts for name in fact.plain_names if fact.verb == "overrides"}
    return {(ours.__name__, name) for user, ours, name, _ in names if (user, name) not in listed}


def assert_parameters(facts: Sequence[HostFact], names: Sequence[tuple[str, type, str, Any]], version: str) -> int:
    """Call each of our methods, as far as binding arguments, as the table says; returns the number of methods."""
    written = {
        (fact.used_by, name.partition("(")[0]): name
        for fact in facts
        for name in fact.names
        if fact.verb == "overrides" and "(" in name and fact.concerns(version)
    }
    compared = 0
    for user, _, name, value in names:
        if (user, name) not in written:
            continue
        (table,) = ast.parse(f"def {written[user, name]}: ...").body
        assert isinstance(table, ast.FunctionDef)
        own = list(signature(getattr(value, "__func__", value)).parameters.values())
        taken = Signature(own if isinstance(value, staticmethod) else own[1:])
        positional, named = table.args.args, dict.fromkeys(arg.arg for arg in table.args.kwonlyargs)
        taken.bind(*positional[: len(positional) - len(table.args.defaults)], **named)
        taken.bind(*positional, **named)
        if table.args.vararg is not None or table.args.kwarg is not None:
            assert {parameter.kind for parameter in own} & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}, name
        compared += 1
    return compared
