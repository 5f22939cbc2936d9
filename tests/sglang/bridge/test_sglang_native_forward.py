"""OLMo 2 calls ``forward_native`` of its norms of queries and keys itself: our operator runs there too."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import start

from architectures import build_architecture
from running import expected_tokens


@pytest.mark.engine
def test_every_norm_of_olmo_2_is_ours(tmp_path: Path) -> None:
    model = build_architecture("olmo2", tmp_path / "olmo2")
    result = start(model).result()
    assert result["steps"][0]["tokens"] == expected_tokens(model)
    calls = {key.split(" ")[0]: count for key, count in result["report"]["counts"].items()}
    layers = result["report"]["attention"]["RadixAttention"]
    steps, rest = divmod(calls["paged_attention"], layers)
    assert (rest, result["report"]["native_layers"]) == (0, {})
    assert calls["rms_norm"] == (4 * layers + 1) * steps
