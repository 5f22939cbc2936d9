"""What a running ``vllm serve`` does with a request whose logits have NaN: on a CPU and on a GPU alike."""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import PROMPTS
from served import Server

from poison import ORIGIN, POISON, SAID

COMMON = PROMPTS[2][:64]
POISONED = [*COMMON, POISON, *PROMPTS[1]]
INNOCENT = [*COMMON, *PROMPTS[1]]


def refused(server: Server, prompt: list[int]) -> tuple[int, str]:
    """The status and the message of a request that is not answered."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.tokens(prompt)
    return raised.value.code, json.loads(raised.value.read())["error"]["message"]


def ends_alone(server: Server, right: Sequence[list[int]]) -> None:
    """Check that the poisoned request ends with its origin and leaves nothing, and that others get right answers."""
    alone = server.tokens(INNOCENT)
    with ThreadPoolExecutor(3) as clients:
        others = [clients.submit(server.tokens, PROMPTS[row]) for row in (0, 1)]
        code, why = clients.submit(refused, server, POISONED).result()
        answers = [other.result() for other in others]
    assert answers == right[:2]
    assert code == 500
    assert why == SAID
    assert server.tokens(INNOCENT) == alone  # it has the blocks of the common beginning of both
    assert refused(server, POISONED) == (code, why)
    assert server.tokens(PROMPTS[2]) == right[2]  # in blocks that were the ended requests'
    labels = {**ORIGIN, "rank": "0"}
    assert server.until("fl_damage_total", labels, 2.0) == 2
    named = re.findall(r'^fl_damage_total{.*operator="(.*?)"', server.get("/metrics"), re.MULTILINE)
    assert set(named) == {ORIGIN["operator"]}, "on all ranks"
    assert server.metric("vllm:corrupted_requests_total", {"engine": "0", "model_name": "tiny"}) == 2
    assert server.log.read_text().count("it is computed again and watched") == 2
