"""Check a host version that not all tests ran on, once per installation, because reading its source takes seconds.

Each process of an engine asks. The result is kept in the user's cache directory, under a name that changes with the
host's files, the plugin's files and this package's version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs

from ...errors import DispatchError
from ...logger_manager import get_logger
from ...version import __version__
from ..records.private_file import write_private
from . import yaml_file
from .fact import HostFact, check
from .host import Host
from .source import SourceTree

logger = get_logger(__name__)


def warn_if_untested(
    host: Host, version: str, tested: Sequence[str], *also: str, smoke_tested: Sequence[str] = ()
) -> None:
    """Log one WARNING for a host version that not all tests ran on, with the missing names that we rely on.

    Args:
        host: the host.
        version: its version.
        tested: versions that all tests ran on.
        also: further packages that facts are about.
        smoke_tested: versions that some tests ran on.
    """
    if version not in tested:
        how = "only smoke-tested" if version in smoke_tested else "not a tested version"
        found = findings(host.facts, host.plugin, (host.package, *also), version)
        logger.warning("%s %s is %s (tested: %s): %s", host.name, version, how, ", ".join(tested), found)


def findings(facts: Callable[[], tuple[HostFact, ...]], plugin: str, packages: Sequence[str], version: str) -> str:
    """Return in words which of our facts do not hold for the installed host.

    Args:
        facts: returns the plugin's facts, from its source.
        plugin: the plugin's package.
        packages: the top-level packages to read the source of, the host's first.
        version: the host's version.
    """
    tree = SourceTree.installed(*packages)
    folders = (yaml_file.folder_of(plugin), *tree.packages.values())
    text = "\n".join([__version__, version, *map(_state, folders)])
    name = f"{packages[0]}-{version}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.txt"
    kept = platformdirs.user_cache_path("fl-dispatch") / "checked-hosts" / name
    try:
        return kept.read_text(encoding="utf-8")
    except (OSError, ValueError):
        found = str(check(facts(), tree, version))
    try:
        write_private(kept, found, "the check of the host")
    except DispatchError as error:
        logger.debug("the check of the host is not kept: %s", error)
    return found


def _state(folder: Path) -> str:
    """Return a folder's Python files and facts as one line that changes when one of them changes."""
    stats = [file.stat() for pattern in ("*.py", yaml_file.NAME) for file in folder.rglob(pattern)]
    size, newest = sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)
    return f"{folder} {len(stats)} {size} {newest}"
