"""Quantized models whose layers keep a state in vLLM's engines: eager ones, compiled ones, and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from host_engines import Engine, Host, Pass
from quantized_checkpoints import SCHEMES, write_checkpoint
from quantized_states import PLANTED_PAIRS, SCHEMES_OF_STATES, SIZES, Mistaken, QuantizedStates, Run, build
from sampling import drawn

REFUSED = {("granitemoehybrid", "gptq"), ("mamba2", "gptq")}
"""Pairs that end while they load: vLLM looks Granite's layers up by another name, and loads no ``g_idx`` of Mamba 2."""
PAIRS = [(name, scheme) for name in SIZES for scheme in SCHEMES_OF_STATES if (name, scheme) not in REFUSED]
TWO = {"tensor_parallel_size": 2}
RANKS = [("qwen3_5", "fp8"), ("lfm2", "awq")]


@pytest.mark.engine
class TestQuantizedStates(QuantizedStates):
    ALONE = [Run(scheme, kind="eager", model=name) for name, scheme in drawn(PAIRS, 2, "quantized states")]
    RUNS = [
        *ALONE,
        *(
            Run(scheme, {"enforce_eager": False}, "compiled", name)
            for name, scheme in drawn(PAIRS, 1, "quantized states, compiled")
        ),
        *(Run(scheme, TWO, "two ranks", name) for name, scheme in drawn(RANKS, 0, "quantized states, ranks")),
    ]
    MISTAKEN = [
        Mistaken(scheme, kind="eager", model=name) for name, scheme in drawn(PLANTED_PAIRS, 1, "wrong scales of a part")
    ]

    def test_ranks_that_share_a_group_of_a_state_refuse_weights_without_a_scale_a_column(
        self, host: Host, tmp_path: Path
    ) -> None:
        checkpoint = write_checkpoint(tmp_path / "awq", SCHEMES["awq"], model=build("mamba2", tmp_path / "model"))
        with pytest.raises(AssertionError, match="ranks that share a group of a state with weights"):
            host.serve(Engine(checkpoint, [Pass()], TWO))[0].result()
