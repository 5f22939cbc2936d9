"""Result files as the commands write them, of few rows each, for the rules of the report."""

from __future__ import annotations

import time
from typing import Any

MACHINE: dict[str, Any] = {"device": "a chip", "date": "2026-11-23", "versions": {"torch": "2.13.0"}}
ORIGIN: dict[str, Any] = {"machine": MACHINE, "commit": "0123abc", "command": "fl verify"}
TIMES = {"median": 12.5, "low": 12.0, "high": 13.0, "rounds": 9, "how": "graph"}
VERIFIED: dict[str, Any] = {
    **ORIGIN,
    "results": [
        {
            "op_name": "rms_norm",
            "impl_id": "vendor.acme",
            "dtype": dtype,
            "how": "direct",
            "samples": 15,
            "declined": {},
            "worst": {"share": 0.25},
            "problems": problems,
            "verdict": "wrong" if problems else "right",
        }
        for dtype, problems in (("float32", []), ("bfloat16", ["empty: 3 elements were not written"]))
    ],
    "absent": [["linear", "vendor.acme", "its library is missing"]],
}
BENCHED: dict[str, Any] = {
    **ORIGIN,
    "dtype": "bfloat16",
    "copy_bytes_per_s": 4.1e12,
    "operations_per_s": 7.5e14,
    "results": [
        {
            "op_name": "rms_norm",
            "impl_id": "vendor.acme",
            "label": "",
            "tokens": tokens,
            "width": 4096,
            "device_us": TIMES,
            "host_us": None,
            "share_of_floor": 0.875,
            "share_of_copy": 0.9,
            "note": "",
        }
        for tokens in (1, 256)
    ]
    + [
        {"op_name": "rms_norm", "impl_id": "vendor.shy", "label": "", "tokens": 1, "width": 4096, "device_us": None,
         "host_us": None, "share_of_floor": None, "share_of_copy": None, "note": "declined"}
    ],
}  # fmt: skip
TUNED: dict[str, Any] = {
    **ORIGIN,
    "keys": [
        {
            "op_name": "rms_norm",
            "dtype": "bfloat16",
            "tokens": 16,
            "phase": None,
            "chosen": "vendor.acme",
            "why": "the fastest",
            "candidates": {
                "vendor.acme": {"us": 10.5, "low": 10.0, "high": 11.0, "repeats": 20, "problem": ""},
                "reference.torch": {"us": 21.0, "low": 20.0, "high": 22.0, "repeats": 20, "problem": ""},
                "vendor.late": {"problem": "compiles after the start"},
            },
        }
    ],
}
SERVED: dict[str, Any] = {
    "machine": {"gpu": "a chip", "vllm": "0.32.0", "shape": "llama-3.1-8b", "rounds": 5},
    "compared": {
        "decode, batch 1": {
            "vanilla_triton": {"tokens_per_s": 210.5, "ratio": 1.0, "low": 1.0, "high": 1.0},
            "plugin_shipped": {"tokens_per_s": 231.75, "ratio": 1.101, "low": 1.095, "high": 1.107},
        }
    },
}
BESIDE_VANILLA: dict[str, Any] = {
    **ORIGIN,
    "runs": [
        {"dtype": "float32", "mode": "eager", "rounds": 3,
         "results": {"decode": {"vanilla": 28.7, "plugin": 30.1, "ratio": 1.049, "interval": [1.01, 1.08]}}}
    ],
}  # fmt: skip
SCORED: dict[str, Any] = {
    **ORIGIN,
    "model": "/models/small",
    "text": "held_out.txt",
    "host": "vllm",
    "prefer": None,
    "compiled": False,
    "dtype": "bfloat16",
    "tokens": 6861,
    "perplexity": 47.125,
    "expected": 47.0,
    "tolerance": 0.005,
    "right": True,
    "report": {"pid": 7, "counts": {"rms_norm vendor.acme": 99}, "decisions": {}},
}
FINDING: dict[str, Any] = {
    "operator": "rms_norm", "implementation": "vendor.acme", "second": "reference.torch", "kind": "bfloat16, rank 2",
    "calls": 3, "worst": 41.5, "example": "1.5 instead of 1.0", "outcome": "banned", "first": 0.0, "last": 9.0,
}  # fmt: skip
RECORD: dict[str, Any] = {
    "host": "vLLM 0.32.0",
    "pid": 123456789,
    "model": "a-model",
    "time": time.time(),
    "layers": {"RMSNorm": ["rms_norm", 13]},
    "native": {"Mystery": 2},
    "undispatched": {},
    "something of a later version": [1, 2],
    "choices": {
        "decisions": {
            "rms_norm": {
                "considered": [{"impl_id": "vendor.acme", "kind": "vendor", "status": "chosen", "reason": "first"}]
            }
        },
        "failed": [
            {"operator": "linear", "implementation": "vendor.acme", "kind": "f16", "cause": "no kernel", "fallbacks": 8}
        ],
        "shadow": {"share": 0.01, "second": "reference", "compared": {"rms_norm b": 500}, "findings": [FINDING]},
    },
}  # fmt: skip
FILES: dict[str, Any] = {
    "verify": VERIFIED,
    "bench": BENCHED,
    "tune": TUNED,
    "serve": SERVED,
    "cpu": BESIDE_VANILLA,
    "ppl": SCORED,
}
