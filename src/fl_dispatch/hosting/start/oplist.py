"""The list of operators that FlagGems runs, written to ``FLAGGEMS_ENABLE_OPLIST_PATH`` by every worker.

One name per line: our operators with FlagGems as first choice, and names like ``aten::mm.out`` for PyTorch's operators
that it replaces.
"""

from __future__ import annotations

from pathlib import Path

from ...aten_replacement import replaced_operators
from ...manager import OpManager
from ...selection.refusals import FLAGGEMS_ID
from ...settings import Settings
from ..records.private_file import write_private


def flaggems_operators(manager: OpManager) -> list[str]:
    """Return the operators with FlagGems as first choice, sorted."""
    manager.ensure_initialized()
    chosen = {op: manager.explain(op).chosen for op in manager.registry.list_operators()}
    return sorted(op for op, impl in chosen.items() if impl is not None and impl.impl_id == FLAGGEMS_ID)


def record(manager: OpManager, settings: Settings, rank: int | None = None) -> Path | None:
    """Write the list to the path of the settings; to the default path only if FlagGems runs an operator.

    Raises:
        DispatchError: see :func:`write_oplist`.
    """
    operators = [*flaggems_operators(manager), *replaced_operators()]
    if not operators and settings.origin("oplist_path").source == "default":
        return None
    return write_oplist(settings.oplist_path, operators, rank)


def write_oplist(path: Path, operators: list[str], rank: int | None = None) -> Path:
    """Write the list; with a rank, to a separate file (``name.rank1.txt``).

    Raises:
        DispatchError: see :func:`~fl_dispatch.hosting.records.private_file.write_private`.
    """
    if rank is not None and path.name not in ("", ".."):  # these name no file
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    write_private(path, "".join(f"{name}\n" for name in operators), "FLAGGEMS_ENABLE_OPLIST_PATH")
    return path
