"""Steps of one token: compiled graphs call one operator for a product, the norm before it and the gate behind it.

No CPU has an implementation of that operator but the reference, so a plugin brings one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, Runs, ran, start_compiled

import quantized_checkpoints as checkpoints
from quantized_checkpoints import SCHEMES
from running import MAX_TOKENS as TOKENS

JOINED = "fused_linear"
RIGHT = {"deny_vendors": ["wrong", "cpu"]}
"""One vendor has the joined operator and all of its parts."""
DENSE, SCHEME = "llama", "compressed-tensors W8A8 fp8"
LAYERS = 3
ONE_AT_A_TIME = {"max_num_seqs": 1}
STEPS = len(PROMPTS) * (TOKENS - 1)
"""Steps of one token, where requests come one after the other; the first token comes with the prompt."""
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "a rule for a part": {**RIGHT, "per_op_order": {"silu_and_mul": ["vendor", "reference"]}},
    "nothing but references": {"deny_vendors": ["wrong", "cpu", "one_token"]},
    "another backend's part": {"deny_vendors": ["wrong"], "per_op_order": {}},
}


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = checkpoints.write_checkpoint(tmp_path_factory.mktemp("one") / "fp8", SCHEMES[SCHEME])

    def engine(model: Path, policy: Mapping[str, Any] = RIGHT, **more: Any) -> dict[str, Any]:
        config = {"mode": "VLLM_COMPILE", "backend": "inductor"}
        return {
            "model": model,
            "engine": {"enforce_eager": False, "compilation_config": config, **more},
            "policy": policy,
        }

    dense = checkpoint(DENSE)
    engines = {
        "one": engine(dense, **ONE_AT_A_TIME),
        "several": engine(dense),
        "fp8": engine(folder, **ONE_AT_A_TIME),
        "wrong": engine(
            dense, {"per_op_order": {JOINED: ["impl:vendor.wrong"]}, "deny_vendors": ["cpu"]}, **ONE_AT_A_TIME
        ),
        **{name: engine(dense, policy, **ONE_AT_A_TIME) for name, policy in POLICIES.items()},
    }
    plugins = {"VLLM_FL_PLUGIN_MODULES": "one_token_plugin,wrong_plugin"}

    def start(engines: Mapping[str, Any], **variables: str) -> dict[str, Any]:
        return start_compiled(engines, VLLM_CACHE_ROOT=str(tmp_path_factory.mktemp("cache")), **plugins, **variables)

    off = {"off": engine(dense, **ONE_AT_A_TIME), "fp8, off": engine(folder, **ONE_AT_A_TIME)}
    return Runs({**start(engines), **start(off, VLLM_FL_FUSE_ONE_TOKEN="0")})


def calls(result: Mapping[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for key, count in result["report"]["counts"].items():
        found[key.split(" ")[0]] += count
    return found


@pytest.mark.parametrize("name", ["one", "several", "off", *POLICIES])
def test_the_tokens_are_hugging_faces(
    name: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results[name]["tokens"] == expected(DENSE)
    assert results[name]["report"]["failed"] == {}


def test_a_layer_calls_it_for_the_two_products_behind_a_norm(results: Mapping[str, Any]) -> None:
    assert ran(results["one"], JOINED) == {"vendor.one_token"}
    found = calls(results["one"])
    assert found[JOINED] == 2 * LAYERS * STEPS
    assert found["linear"] == 2 * found[JOINED] / 2 + 4 * LAYERS * len(PROMPTS)
    assert results["one"]["report"]["compiled"]["fused products"] > 0
