"""``fl bisect`` finds what is planted in a real SGLang: one that the commit draws, in ``make test-all`` each."""

from __future__ import annotations

import pytest
import serving

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
)
"""Those that were seen to be found, or rightly not blamed; docs/guide/commands/bisect.md has the others."""
FAULTS = drawn(SHOWN, 1, "planted faults, SGLang")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else_is_blamed(name: str) -> None:
    bisecting.check("sglang", name, serving.environment())
