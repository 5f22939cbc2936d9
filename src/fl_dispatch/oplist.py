"""The list of operators that FlagGems runs, written to ``FLAGGEMS_ENABLE_OPLIST_PATH`` by every worker.

One name a line. The file is the user's own: mode 0600, replaced atomically, and never through a link that a stranger
may have planted.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import DispatchError
from .op_manager import OpManager
from .selection import FLAGGEMS_ID
from .settings import Settings
from .settings.place import printable


def flaggems_operators(manager: OpManager) -> list[str]:
    """The operators for which FlagGems is the first choice, sorted."""
    manager.ensure_initialized()
    chosen = {op: manager.explain(op).chosen for op in manager.registry.list_operators()}
    return sorted(op for op, impl in chosen.items() if impl is not None and impl.impl_id == FLAGGEMS_ID)


def record(manager: OpManager, settings: Settings, rank: int | None = None) -> Path | None:
    """Write the list where the settings say; with the default place only if FlagGems runs anything.

    Raises:
        DispatchError: see :func:`write_oplist`.
    """
    operators = flaggems_operators(manager)
    if not operators and settings.origin("oplist_path").source == "default":
        return None
    return write_oplist(settings.oplist_path, operators, rank)


def write_oplist(path: Path, operators: list[str], rank: int | None = None) -> Path:
    """Write the list; with a rank, to a file of that rank's own (``name.rank1.txt``).

    A folder that does not exist is made. What was there before stays until the new list is complete.

    Raises:
        DispatchError: the place is a link or no regular file, a stranger's link leads to it, or it cannot be written.
    """
    try:
        if path.name in ("", ".."):
            raise ValueError("it names no file")
        if rank is not None:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        _refuse_strangers_links(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.lstat().st_mode)):
            raise _error(path, "is a link or no regular file; nothing is written there")
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write("".join(f"{name}\n" for name in operators))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:
        raise _error(path, f"cannot be written: {error}") from error
    return path


def _refuse_strangers_links(path: Path) -> None:
    """Follow a folder's link only if we or root made it, or the owner of the folder that it is in, where only that
    owner's word counts. Linux does the same in folders with a sticky bit.

    Raises:
        DispatchError: there is another link on the way.
    """
    for folder in reversed(path.absolute().parents):
        if not folder.is_symlink():
            continue
        owner, above = folder.lstat().st_uid, folder.parent.stat()
        if owner not in (0, os.geteuid()) and (owner != above.st_uid or above.st_mode & stat.S_IWOTH):
            raise _error(path, f"leads through {printable(str(folder))}, a link that somebody else made")


def _error(path: Path, problem: str) -> DispatchError:
    return DispatchError(f"FLAGGEMS_ENABLE_OPLIST_PATH: {printable(str(path))} {problem}")
