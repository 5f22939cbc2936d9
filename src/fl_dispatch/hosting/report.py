"""Report of what runs in a serving process, as plain data that a host can send between processes."""

from __future__ import annotations

import os
from typing import Any

from ..manager import get_default_manager
from . import aten, collectives, handover


def dispatch_report() -> dict[str, Any]:
    """The dispatch core's part of a worker's report.

    ``settings`` is their JSON with the policy that holds, and the origin of each value; ``counts`` is ``"operator
    implementation"`` → calls; ``decisions`` is operator → what ``fl explain --json`` prints; ``failed`` is operator →
    ids; ``communication`` is group → collective → calls; ``manifest`` is what was frozen, or ``None``; ``aten`` is
    backend → which operators of PyTorch it replaces, see :class:`~fl_dispatch.replaced.ReplacementReport`.
    """
    manager = get_default_manager()
    manifest = manager.freezer.manifest
    return {
        "pid": os.getpid(),
        **handover.pack(),
        "counts": {" ".join(key): calls for key, calls in sorted(manager.call_counts().items()) if calls},
        "decisions": {op: manager.explain(op).as_data() for op in manager.registry.list_operators()},
        "failed": {op: sorted(ids) for op, ids in manager.get_failed_impls().items()},
        "communication": collectives.report(),
        "manifest": None if manifest is None else manifest.as_data(),
        "aten": aten.report(),
    }
