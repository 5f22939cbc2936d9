"""``docs/evidence/vllm_manual.md`` has rows for every page of the host's manual, and no state without its evidence."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs/evidence/vllm_manual.md"
PAGES = {
    "Automatic Prefix Caching": "Prefix caching",
    "Contact Us": "Contact us",
    "CUDA Graphs": "CUDA graphs",
    "Dual Batch Overlap": "DBO",
    "Fused MoE Modular Kernel": "Modular kernel",
    "How to debug the vLLM-torch.compile integration": "Debugging",
    "Hybrid KV Cache Manager": "Hybrid manager",
    "Integration with Hugging Face": "Hugging Face",
    "P2P NCCL Connector": "P2P",
    "Paged Attention": "Paged attention",
    "Plugin System": "Plugins",
    "Python Multiprocessing": "Multiprocessing",
    "Reinforcement Learning from Human Feedback": "RLHF",
    "Security": "Security",
    "torch.compile integration": "torch.compile",
    "Transformers Reinforcement Learning": "TRL",
    "Troubleshooting": "Troubleshooting",
    "Usage Stats Collection": "Usage stats",
    "Using vLLM": "Using vLLM",
    "vLLM (index)": "Index",
}
"""Page → how its rows begin."""
NOTE = re.compile(r"\[\^[\w-]+\]")
STATES = ("works", "refused", "not tried yet", "gone from the host", "not ours")


def rows() -> list[list[str]]:
    """``[feature, need, state, evidence]`` of every row; the evidence has its footnote's text."""
    text = TABLE.read_text()
    notes = dict(re.findall(r"^(\[\^[\w-]+\]): (.*(?:\n    .*)*)", text, re.MULTILINE))
    lines = (line for line in text.splitlines() if line.startswith("| ") and "**" in line)
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [[*row, " ".join([evidence, *(notes[name] for name in NOTE.findall(evidence))])] for *row, evidence in found]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_rows(page: str) -> None:
    listed = re.findall(r"^Pages?: (.*?)\.(?: |$)", TABLE.read_text(), re.MULTILINE)
    assert page in ", ".join(listed)
    assert any(row[0].partition(" / ")[0] == PAGES[page] for row in rows())


def test_every_row_belongs_to_a_page_and_has_one_of_the_states() -> None:
    for feature, _, state, _ in rows():
        assert feature.partition(" / ")[0] in PAGES.values(), feature
        assert state.strip("*") in STATES, feature


def test_what_works_names_a_test_and_what_is_refused_quotes_the_sentence() -> None:
    for feature, _, state, evidence in rows():
        if state == "**works**":
            assert "`test_" in evidence, feature
        if state == "**refused**":
            assert re.search(r'"[^"]{20,}"', evidence), feature


def test_every_test_that_the_page_names_exists() -> None:
    tests = {path.name for path in ROOT.glob("tests/**/test_*.py")}
    assert set(re.findall(r"`(test_\w+\.py)`", TABLE.read_text())) - tests == set()


def test_our_own_sentences_name_the_feature_as_the_code_does() -> None:
    folders = (ROOT / "src/vllm_fl", ROOT / "src/fl_transfer")
    code = [ast.parse(path.read_text()) for folder in folders for path in folder.rglob("*.py")]
    texts = [
        _pattern(node) for tree in code for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)
    ]
    for feature, _, _, evidence in rows():
        for named in re.findall(r'"vllm_fl does not support (.*?)(?: on cpu)? yet"', evidence):
            assert any(re.fullmatch(text, named) for text in texts), (feature, named)


def _pattern(node: ast.JoinedStr | ast.Constant) -> str:
    """The pattern of a text in the code: the feature in a whole sentence, or by itself; anything that is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"[\w.]+" for part in parts)
    return text.removeprefix(re.escape("vllm_fl does not support ")).partition(re.escape(" yet"))[0]
