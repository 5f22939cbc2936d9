"""SGLang on the emulated NPU. Without SGLang and ``torch_npu`` nothing in this folder is collected."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from host_engines import Host

collect_ignore_glob = [] if find_spec("torch_npu") and find_spec("sglang") else ["test_*.py"]


@pytest.fixture(scope="session")
def host() -> Host:
    from engines import SGLangOnNPU

    return SGLangOnNPU()
