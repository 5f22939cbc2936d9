"""Two ranks of a host on two emulated NPUs over the stand-in for FlagCX: the environment and the checks.

Only vLLM's test uses them so far, because such an engine never answered under SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from half_on_npu import clear_tokens
from running import MAX_TOKENS, PROMPTS

STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}


def steps(fault: Path, **more: Any) -> list[dict[str, Any]]:
    """Return a right pass, and one while a file exists that makes sums lack the second rank's part."""
    return [STEP, {**STEP, **more, "while": str(fault)}]


def variables(standin: Callable[..., Path], fault: Path) -> dict[str, str]:
    return {"FLAGCX_PATH": str(standin("ASCEND")), "FLAGCX_STANDIN_WRONG": str(fault), "EMU_NPUS": "2"}


def check_tokens(model: Path, result: Mapping[str, Any]) -> None:
    """Check that the right pass has Hugging Face's tokens, as far as half precision decides them."""
    clear = clear_tokens(model, PROMPTS, MAX_TOKENS, "float16")
    assert sum(map(len, clear)) >= 24
    found = result["steps"][0]["tokens"]
    assert [tokens[: len(decided)] for tokens, decided in zip(found, clear, strict=True)] == clear


def check_ranks(result: Mapping[str, Any]) -> None:
    """Check that both ranks called FlagCX equally often, and that every operator was the vendor's."""
    first, second = result["reports"]
    assert len({first["pid"], second["pid"], result["pid"]}) == 3
    assert first["communication"]["tp:0"] == second["communication"]["tp:0"]
    assert first["communication"]["tp:0"]["all_reduce"] > 0
    assert "communication runs through FlagCX, version code 12345" in result["log"]
    for report in (first, second):
        assert {key.split(" ")[1] for key in report["counts"]} == {"vendor.ascend"}
        assert (report["native_layers"], report["failed"]) == ({}, {})


def check_fault(result: Mapping[str, Any]) -> None:
    """Check that wrong sums change the tokens, without reads from the prefix cache."""
    right, wrong = result["steps"]
    assert wrong["cached"] == [0] * len(PROMPTS)
    assert wrong["tokens"] != right["tokens"]
