"""These tests themselves import the version of vLLM that ``FL_HOST_VERSION`` names for their engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from engines import HOST_VERSION
from vllm_host import HOST

from host_engines import Host
from host_files import HOSTS, UNPACKED
from single_quantized import Layers

if version := os.environ.get(HOST_VERSION):
    if not (folder := HOSTS / f"vllm-{UNPACKED[version]}").exists():
        raise pytest.UsageError(f"vLLM {version} is not unpacked: make hosts")
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def host() -> Host:
    return HOST


@pytest.fixture(scope="class")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layers]:
    from single_layers import one_rank

    with one_rank(tmp_path_factory.mktemp("ranks")) as found:
        yield found
