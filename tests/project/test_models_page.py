"""``docs/evidence/models.md`` calls an architecture tested where a test serves it, and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import states
from architectures import ARCHITECTURES
from fl_dispatch.cli.checkpoints import FAMILIES as BUILT
from fl_dispatch.cli.checkpoints import configuration

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/evidence/models.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
NAMES = {family: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[configuration(family).model_type] for family in BUILT}


def of_transformers(configuration: str) -> str:
    """The architecture of a class of Transformers' configurations."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[getattr(transformers, configuration).model_type]


def families(test: str, name: str) -> set[str]:
    """The architectures of a test's families, the keys of a dictionary; importing the test needs its host."""
    tree = ast.parse((ROOT / "tests" / test).read_text(encoding="utf-8"))
    found = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    assert isinstance(found, ast.Dict)
    return {NAMES[ast.literal_eval(key)] for key in found.keys if key is not None}


def test_the_page_names_an_architecture_once() -> None:
    assert len({name for name, *_ in ROWS}) == len(ROWS) > 50


def test_vllms_tested_architectures_are_those_that_its_tests_serve() -> None:
    served = {of_transformers(kind) for kind, _ in ARCHITECTURES.values()}
    assert {name for name, vllm, _ in ROWS if vllm == "tested"} == served | families(
        "vllm/models/test_families.py", "FAMILIES"
    )


def test_sglangs_tested_architectures_are_those_that_its_tests_serve() -> None:
    served = families("sglang/models/test_sglang_tokens.py", "OPERATORS")
    served |= {of_transformers(ARCHITECTURES[name][0]) for name in states.OPERATORS}
    served |= {of_transformers(ARCHITECTURES["gpt_oss"][0])}  # sglang/quantization/test_sglang_gpt_oss.py
    assert {name for name, _, sglang in ROWS if sglang == "tested"} == served


def test_a_model_with_states_that_vllm_serves_is_on_the_page_and_not_refused() -> None:
    tree = ast.parse((ROOT / "src/vllm_fl/platform/model_refusals.py").read_text(encoding="utf-8"))
    (served,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STATE_MODELS"
    )
    said = {name: vllm for name, vllm, _ in ROWS}
    assert {name: said.get(name, "not on the page") for name in served if said.get(name) in (None, "refused")} == {}
