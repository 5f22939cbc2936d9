"""The host's own connector moves the KV cache from an engine that reads prompts to one that goes on with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_TOKENS, PROMPTS, start_features

BLOCK = 16
LONG = PROMPTS[1:3]
"""The connector of the host's examples fails on prompts of one token, and on those that are read in parts."""


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """An engine that reads the prompts, then one that gets what it read and writes."""
    folder, model = tmp_path_factory.mktemp("connectors"), checkpoint("qwen3")

    def connected(role: str) -> dict[str, Any]:
        place = {"shared_storage_path": str(folder)}
        named = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": place}
        return {"kv_transfer_config": named, "max_num_batched_tokens": 512}

    def ask(tokens: int) -> list[dict[str, Any]]:
        generate = {"do": "generate", "prompts": LONG, "sampling": {"max_tokens": tokens}}
        return [generate, {"do": "metrics", "contains": "external_prefix_cache"}]

    jobs = ((model, ask(1), connected("kv_producer")), (model, ask(MAX_TOKENS), connected("kv_consumer")))
    return list(start_features(*jobs).result()["runs"])


def test_the_second_engine_writes_hugging_faces_tokens(
    runs: list[dict[str, Any]], expected: Callable[[str], list[list[int]]]
) -> None:
    read, written = ([output["tokens"][0] for output in run["steps"][0]] for run in runs)
    assert written == expected("qwen3")[1:3]
    assert read == [tokens[:1] for tokens in written]


def test_it_computes_only_what_the_first_one_has_not(runs: list[dict[str, Any]]) -> None:
    first, second = (run["steps"][1]["vllm:external_prefix_cache_hits"] for run in runs)
    assert first == 0
    assert second == sum((len(prompt) - 2) // BLOCK * BLOCK for prompt in LONG)
