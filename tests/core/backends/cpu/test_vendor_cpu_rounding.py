"""Each build of the wheel's kernels that this processor can run is verified in bfloat16, in a process of its own.

Builds for processors without AVX512-BF16 cut results off where others round; ``vendor.cpu`` computes in float32 there.
Attention and experts, which have their cache or weights in bfloat16, are declined.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fl_dispatch.backends.vendor.cpu import library

MISSING = library.why_unavailable()
ROUNDS = "_C.abi3.so"
"""The build for processors with AVX512-BF16."""
OPERATORS = ("linear", "rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding", "kv_cache_write")
DECLINED = ("paged_attention", "fused_moe")

VERIFY = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
from fl_dispatch import get_default_manager
from fl_dispatch.backends.vendor.cpu.impl import limits
from fl_dispatch.evidence.verify import implementations, verify
manager, cpu = get_default_manager(), torch.device("cpu")
found = implementations(manager, sys.argv[2:], ["vendor.cpu"])
results = [verify(manager, impl, torch.bfloat16, cpu, repeats=1, race_calls=0) for impl in found]
print(json.dumps([limits.rounds(torch.bfloat16), {each.op_name: [each.verdict, *each.problems] for each in results}]))
"""


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(("name", "needs"), library.LIBRARIES, ids=[name for name, _ in library.LIBRARIES])
def test_results_are_rounded_whichever_build_is_loaded(name: str, needs: frozenset[str]) -> None:
    if not needs <= library.processor_flags():
        pytest.skip(f"this processor has no {', '.join(sorted(needs - library.processor_flags()))}")
    best, _ = library.locate()
    assert best is not None
    command = [sys.executable, "-c", VERIFY, str(best.with_name(name)), *OPERATORS, *DECLINED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rounds, results = json.loads(done.stdout.splitlines()[-1])
    assert rounds or name != ROUNDS
    for operator in DECLINED:
        assert results.pop(operator) == ["right" if rounds else "nothing to run"]
    assert results == {operator: ["right"] for operator in OPERATORS}
