"""These tests themselves import the version of vLLM that ``FL_HOST_VERSION`` names for their engines."""

from __future__ import annotations

import os
import sys

import pytest
from engines import HOST_VERSION, HOSTS, UNPACKED
from host_of_scenarios import VLLM

from host_engines import Host

if version := os.environ.get(HOST_VERSION):
    if not (folder := HOSTS / f"vllm-{UNPACKED[version]}").exists():
        raise pytest.UsageError(f"vLLM {version} is not unpacked: make hosts")
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def host() -> Host:
    return VLLM()
