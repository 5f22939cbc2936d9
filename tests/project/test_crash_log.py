"""A process of the tests that crashes says where."""

from __future__ import annotations

import os

import pytest

import processes

CRASH = """
import ctypes, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def crash():
    ctypes.string_at(0)
crash()
"""


@pytest.mark.parametrize("cold", [False, True])
def test_the_log_has_the_stack_of_a_crash(cold: bool) -> None:
    ended = processes.python("-c", CRASH, environment=os.environ, cold=cold)
    assert ended.returncode < 0
    assert 'File "<string>", line 5 in crash\n  File "<string>", line 6 in <module>' in ended.log
