"""A plugin of another distribution that takes away what one of our hooks is applied to; nobody calls it on one rank."""

from __future__ import annotations

import multiprocessing


def everywhere() -> None:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    del GroupCoordinator.all_gatherv


def in_children() -> None:
    if multiprocessing.parent_process() is not None:
        everywhere()
