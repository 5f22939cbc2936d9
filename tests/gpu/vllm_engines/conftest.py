"""Scenarios of these modules ask vLLM."""

from __future__ import annotations

import pytest

from host_engines import Host


@pytest.fixture(scope="session")
def host() -> Host:
    from host_of_scenarios import VLLM

    return VLLM()
