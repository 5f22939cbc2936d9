"""Lengths are hints only where vLLM's copies on the host are exact when attention reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_fl.attention.metadata import has_exact_host_lengths


@pytest.mark.parametrize(
    ("speculation", "fast_prefill", "exact"), [(None, False, True), (object(), False, False), (None, True, False)]
)
def test_lengths_that_only_the_device_knows_yet_are_no_hints(
    speculation: object, fast_prefill: bool, exact: bool
) -> None:
    """Fast prefill of layers that share a cache hands over a copy that is still on its way from the device."""
    cache = SimpleNamespace(kv_sharing_fast_prefill=fast_prefill)
    assert has_exact_host_lengths(SimpleNamespace(speculative_config=speculation, cache_config=cache)) is exact
