"""A private file of the user: mode 0600, replaced atomically, never through another user's link."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from ...errors import DispatchError
from ...settings.place import printable


def write_private(path: Path, text: str, what: str) -> None:
    """Write a file. A missing folder is made; the old file stays until the new text is complete.

    Args:
        path: the file.
        text: its new content.
        what: the subject of an error, such as the variable that names the file.

    Raises:
        DispatchError: the path is a link or not a regular file, another user's link leads to it, or it cannot be
            written.
    """
    try:
        if path.name in ("", ".."):
            raise ValueError("it names no file")
        _refuse_strangers_links(path, what)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.lstat().st_mode)):
            raise _error(path, "is a link or no regular file; nothing is written there", what)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:
        raise _error(path, f"cannot be written: {error}", what) from error


def _refuse_strangers_links(path: Path, what: str) -> None:
    """Follow a folder's link only if this user or root made it, or the owner of a folder that only its owner may write.

    Linux applies the same rule to folders with a sticky bit.

    Raises:
        DispatchError: there is another link on the way.
    """
    for folder in reversed(path.absolute().parents):
        if not folder.is_symlink():
            continue
        owner, above = folder.lstat().st_uid, folder.parent.stat()
        if owner not in (0, os.geteuid()) and (owner != above.st_uid or above.st_mode & stat.S_IWOTH):
            raise _error(path, f"leads through {printable(str(folder))}, a link that another user made", what)


def _error(path: Path, problem: str, what: str) -> DispatchError:
    return DispatchError(f"{what}: {printable(str(path))} {problem}")
