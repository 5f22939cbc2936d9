"""Hooks in SGLang: rows of data, registered through SGLang's own ``HookRegistry``.

SGLang logs a hook that does not apply and continues without it, so :func:`unapplied` checks afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..version import host_version

Kind = Literal["around", "after", "replace"]


@dataclass(frozen=True)
class Hook:
    """One function or method of SGLang that we wrap, follow, or replace.

    Args:
        target: its dotted path; resolving it imports the module.
        call: ``around``: called with the original function before the arguments; ``after``: with the result before the
            arguments, and a result of ``None`` keeps it; ``replace``: with the arguments.
        kind: see ``call``.
        reason: the problem without the hook.
    """

    target: str
    call: Callable[..., Any]
    kind: Kind
    reason: str


_registered: dict[str, Hook] = {}  # by target


def register(hooks: Iterable[Hook]) -> None:
    """Register each hook once in this process; SGLang applies them when all plugins are loaded.

    Raises:
        RuntimeError: SGLang has already applied another package's hooks to a target, and applies hooks only once.
    """
    for hook in hooks:
        _registered[hook.target] = hook
        if all(call is not hook.call for _, call, _ in HookRegistry._hooks.get(hook.target, ())):
            if hook.target in HookRegistry._patched:
                raise RuntimeError(
                    f"hooks of {hook.target} were applied before the plugins were loaded, and SGLang takes no more: "
                    "register them, and let load_plugins() apply them"
                )
            HookRegistry.register(hook.target, hook.call, HookType[hook.kind.upper()])


def unapplied(hooks: Iterable[Hook]) -> list[Hook]:
    """Return the hooks that SGLang did not apply."""
    return [hook for hook in hooks if hook.target not in HookRegistry._patched]


def refuse_unhooked() -> None:
    """Raise ``RuntimeError`` if SGLang did not apply a hook, because it only logs that and would continue."""
    missing = unapplied(_registered.values())
    if len(missing) == len(_registered):
        raise RuntimeError(
            f"SGLang {host_version()} runs the platform of sglang_fl and did not apply any of its hooks: "
            "SGLANG_PLUGINS must contain 'fl' if it is set"
        )
    if missing:
        named = "; ".join(f"{hook.target} ({hook.reason})" for hook in missing)
        raise RuntimeError(f"SGLang {host_version()} did not apply hooks of sglang_fl: {named}. SGLang's log says why")
