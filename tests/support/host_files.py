"""Python files of other versions of vLLM, which ``make hosts`` unpacks: an engine may run them over its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

HOSTS = Path(__file__).parents[2] / ".venv-hosts"
UNPACKED = {"0.33": "0.33.0"}


def files_of_vllm(version: str) -> Path:
    """Return the folder with the files of a version; if they are missing, skip the test."""
    folder = HOSTS / f"vllm-{UNPACKED[version]}"
    if not folder.exists():
        pytest.skip(f"vLLM {version} is not unpacked: make hosts")
    return folder
