"""Scenarios of these modules ask SGLang."""

from __future__ import annotations

import pytest

from host_engines import Host


@pytest.fixture(scope="session")
def host() -> Host:
    from sglang_host import HOST

    return HOST
