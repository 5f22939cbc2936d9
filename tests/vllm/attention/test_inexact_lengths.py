"""Lengths are hints only where vLLM's copies on the host are exact when attention reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.attention.metadata import has_exact_host_lengths
from vllm_fl.schedulers import SCHEDULERS


@pytest.mark.parametrize(
    ("speculation", "fast_prefill", "scheduler", "exact"),
    [
        (None, False, None, True),
        (object(), False, None, False),
        (None, True, None, False),
        (None, False, SCHEDULERS[False], True),
        (None, False, SCHEDULERS[True], False),
    ],
)
def test_lengths_that_only_the_device_knows_yet_are_no_hints(
    speculation: object, fast_prefill: bool, scheduler: str | None, exact: bool
) -> None:
    """Fast prefill of layers that share a cache hands over a copy that is still on its way from the device.

    An arriving request may end several steps after vLLM has scheduled the next ones.
    """
    config: Any = SimpleNamespace(
        speculative_config=speculation,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
    )
    assert has_exact_host_lengths(config) is exact
