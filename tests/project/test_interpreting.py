"""The interpreter that tests make quicker gives the same bits as Triton's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from interpreting import run

pytest.importorskip("triton")

PROGRAM = """
import hashlib, json, torch
from fl_dispatch import get_default_manager
from fl_dispatch.evidence.verify import implementations
from fl_dispatch.ops import OPERATORS

LABELS = {
    "gated_delta_rule_update": "key size 24, value size 40, odd heads",
    "paged_attention": "int8 cache, alibi, sinks",
    "weight_only_linear": "4 bits, small groups, odd columns",
    "topk_softmax": "60 experts",
    "linear": "1 of 1431 to 77",
}
manager, found = get_default_manager(), {}
for name, label in LABELS.items():
    (impl,) = implementations(manager, [name], ["default.triton"])
    for dtype in (torch.float16, torch.bfloat16):
        samples = []
        for make in filter(None, (OPERATORS[name].samples, OPERATORS[name].probes)):
            samples += make(dtype, torch.device("cpu"), torch.Generator().manual_seed(0))
        (args,) = [sample.args for sample in samples if sample.label == label]
        result = impl.fn(*args)
        results = result if isinstance(result, tuple) else (result,)
        tensors = [one for one in (*args, *results) if torch.is_tensor(one)]
        memory = b"".join(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors)
        found[f"{name} {dtype}"] = hashlib.sha256(memory).hexdigest()
print(json.dumps(found))
"""


def test_every_bit_is_what_tritons_own_interpreter_gives() -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    plain = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True)
    quick = json.loads(run(PROGRAM))
    assert len(quick) == 10
    assert quick == json.loads(plain.stdout)
