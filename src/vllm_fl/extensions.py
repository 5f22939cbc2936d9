"""Packages that add features of vLLM which dispatch no operator: entry points of the group ``vllm_fl.extension``.

An entry point names a module with the names of :class:`Extension`, such as ``fl_transfer``. The plugin serves
everything else without extensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol

from fl_dispatch.errors import PluginLoadError, text_of
from fl_dispatch.hosting.facts.fact import HostFact

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GROUP = "vllm_fl.extension"


class Extension(Protocol):
    """The names of an extension's module."""

    __name__: str

    def facts(self) -> tuple[HostFact, ...]:
        """Return vLLM's names that it relies on; ``used_by`` has modules below the extension's own package."""

    def offer(self) -> None:
        """Register its names with vLLM's factories. Idempotent."""

    def unserved(self, vllm_config: VllmConfig) -> list[tuple[bool, str]]:
        """Return features that it does not serve, each with whether this engine asks for it."""


@cache
def extensions() -> tuple[Extension, ...]:
    """Load the extensions that are installed, in the order of their names."""
    return tuple(map(_load, sorted(entry_points(group=GROUP), key=lambda point: point.name)))


def facts() -> Iterator[HostFact]:
    """Yield all extensions' facts, with the full names of their modules."""
    for extension in extensions():
        package = extension.__name__.partition(".")[0]
        for fact in extension.facts():
            yield replace(fact, used_by=", ".join(f"{package}.{user}" for user in fact.used_by.split(", ")))


def _load(point: EntryPoint) -> Extension:
    """Load an extension.

    Raises:
        PluginLoadError: it does not load.
    """
    try:
        found: Extension = point.load()
    except Exception as error:
        raise PluginLoadError(
            f"the extension '{point.name}' ({point.value}) of vllm_fl does not load: {text_of(error)}; "
            "repair or uninstall its package"
        ) from error
    return found
