"""``fl bisect`` finds what is planted in a real vLLM: one that the commit draws, in ``make test-all`` each."""

from __future__ import annotations

import engines
import pytest

import bisecting
from sampling import drawn

pytestmark = pytest.mark.engine

SHOWN = (
    "one_shape",
    "bfloat16_only",
    "bfloat16_only-float32",
    "beyond_256",
    "leftover",
    "one_rank",
    "dies",
    "not_exact",
    "not_exact-bfloat16",
)
"""Those that were seen to be found, or rightly not blamed; docs/bisect.md has the others."""
FAULTS = drawn(SHOWN, 1, "planted faults")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else_is_blamed(name: str) -> None:
    bisecting.check("vllm", name, engines.environment())
