"""The heap of an engine on a CPU keeps its buffers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from fl_dispatch.hosting.memory import heap
kept = heap.keep_buffers() if sys.argv[1] == "keep" else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.empty(40 << 18).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""
PAGES = 4 * 40 * 256  # of four buffers of 40 MiB


def run(what: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", CODE, what]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the C library is not glibc")
def test_a_step_takes_the_buffers_of_the_last_one_again() -> None:
    said, faults = run("keep")
    assert (said, int(faults) < PAGES // 10) == ("True", True)
    assert int(run("leave")[1]) >= PAGES, "that is what glibc does by itself"


def test_limits_that_the_user_sets_stay() -> None:
    said, faults = run("keep", MALLOC_TRIM_THRESHOLD_="1000000")
    assert (said, int(faults) >= PAGES) == ("False", True)
