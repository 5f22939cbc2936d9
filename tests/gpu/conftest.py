"""Engines on a GPU are started as the hosts' own tests do, and cold: their imports start threads that a fork loses."""

from __future__ import annotations

import sys
from pathlib import Path

import processes

TESTS = Path(__file__).parents[1]
OF_VLLM = ("vllm", "vllm/plugins")
OF_SGLANG = ("sglang", "sglang/entrypoints", "sglang/layers", "sglang/speculation")
sys.path[:0] = [str(TESTS / folder) for folder in (*OF_VLLM, *OF_SGLANG)]

processes.always_cold = True
