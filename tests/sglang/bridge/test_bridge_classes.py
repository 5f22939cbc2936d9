"""Every fused operator of SGLang is bridged, or stays with SGLang for a reason that is written down."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_dispatch.hosting.facts.source import SourceTree
from sglang_fl.bridge import BRIDGES, NATIVE, PENDING, find
from sglang_fl.bridge.mixture import SCALING_BLOCKS
from sglang_fl.host import HOST

ROOT = "BaseFusedOp"
ROWS = {row.name: row for row in BRIDGES}
WRAPPERS = {"Gemma3nRMSNorm", "Glm4vRMSNorm"}
"""Classes of models that wrap ``forward`` and call that of a bridged class."""
OLDER = {
    "CompressorHip",
    "FusedAddRMSNormOp",
    "GeluAndMulOp",
    "GeluTanhAndMulOp",
    "GemmaFusedAddRMSNormOp",
    "GemmaRMSNormOp",
    "QuickGELUOp",
    "RMSNormOp",
    "ReLU2Op",
    "_GatedActivationOp",
}
"""Classes of SGLang 0.5.21 that the tested version does not have."""
NOT_FUSED = {"Phi3LongRoPEScaledRotaryEmbedding"}
"""Bridged classes that are plain modules."""


@dataclass(frozen=True)
class Class:
    """A class as its source has it."""

    bases: tuple[str, ...]
    body: ast.ClassDef

    def defines(self, prefix: str) -> list[str]:
        """Methods and aliases whose name starts with this."""
        names = [node.name for node in self.body.body if isinstance(node, ast.FunctionDef)]
        names += [
            target.id
            for node in self.body.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        return [name for name in names if name.startswith(prefix)]


def source() -> Path:
    (folder,) = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    return Path(folder)


def classes(*folders: str) -> dict[str, Class]:
    """Name → class, of all files below. Importing them would need what only GPUs have.

    A name that several files use is that of the bridged class, or of the first; others have their module's name too.
    """
    found: dict[str, Class] = {}
    for folder in folders:
        for file in sorted((source() / folder).rglob("*.py")):
            module = ".".join(file.relative_to(source().parent).with_suffix("").parts)
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    names = (ast.unparse(base) for base in node.bases)
                    bases = tuple(name if "nn." in name else name.rpartition(".")[2] for name in names)
                    elsewhere = ROWS[node.name].module != module if node.name in ROWS else node.name in found
                    found[f"{module}.{node.name}" if elsewhere else node.name] = Class(bases, node)
    return found


@pytest.fixture(scope="module")
def layers() -> dict[str, Class]:
    return classes("srt/layers")


def fused(known: dict[str, Class]) -> Iterator[str]:
    """The classes that derive from SGLang's fused operator."""
    for name in known:
        pending, seen = {name}, set()
        while pending:
            current = pending.pop()
            seen.add(current)
            bases = known[current].bases
            if ROOT in bases:
                yield name
                break
            pending |= {base for base in bases if base in known} - seen


def test_every_fused_operator_of_sglangs_layers_has_a_row_or_a_reason(layers: dict[str, Class]) -> None:
    unknown = []
    for name in fused(layers):
        current = name
        while current not in ROWS and current not in NATIVE:
            bridged = [base for base in layers[current].bases if base in layers]
            if layers[current].defines("forward") or not bridged:
                unknown.append(name)  # it computes something that nobody has looked at
                break
            current = bridged[0]
    assert unknown == []


def test_the_page_gives_the_reasons_that_are_printed() -> None:
    page = (Path(__file__).parents[3] / "docs/evidence/sglang_layers.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+`) \| (.+) \|$", page.partition("## What stays SGLang's")[2], re.MULTILINE)
    said = {name: reason for names, reason in cells for name in re.findall(r"`(\w+)`", names)}
    assert len(said) > 6
    assert said == {name: reason for name, reason in {**NATIVE, **PENDING}.items() if name in said}


def test_no_row_and_no_reason_is_for_a_class_that_is_gone(layers: dict[str, Class]) -> None:
    present = set(fused(layers))
    assert set(ROWS) - NOT_FUSED <= present
    assert set(layers) >= NOT_FUSED
    reasons = {name for name in (*NATIVE, *PENDING) if "." not in name}
    known = {found.cls.node.name for found in HOST.layers.judge(SourceTree.installed("sglang"), "sglang")}
    assert reasons - known == OLDER
    assert not set(ROWS) & reasons
    assert not set(NATIVE) & set(PENDING)


def test_rows_say_which_classes_replace_their_forward(layers: dict[str, Class]) -> None:
    replaced = {name for name in ROWS if "forward" in layers[name].defines("forward")}
    assert replaced == {row.name for row in BRIDGES if row.own_forward}


def test_classes_of_models_that_wrap_a_bridged_forward_call_it(layers: dict[str, Class]) -> None:
    """So the bridge runs inside them."""
    everything = classes("srt/layers", "srt/models")
    wrappers = set()
    for name in fused(everything):
        if name in layers or "forward" not in (own := everything[name].defines("forward")):
            continue
        assert own == ["forward"], name
        assert "super().forward(" in ast.unparse(everything[name].body), name
        wrappers.add(name)
    assert wrappers == WRAPPERS


@pytest.mark.parametrize("row", BRIDGES, ids=lambda row: row.name)
def test_a_class_finds_its_row(scheduler: None, row: object) -> None:
    assert find(getattr(importlib.import_module(row.module), row.name)) is row  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("module", "name", "row"),
    [
        ("sglang.srt.models.gemma3n_causal", "Gemma3nRMSNorm", "RMSNorm"),
        ("sglang.srt.models.glm4v", "Glm4vRMSNorm", "RMSNorm"),
        ("sglang.srt.models.glm_ocr", "GlmOcrRMSNorm", "RMSNorm"),
        ("sglang.srt.models.grok", "ScalingRotaryEmbedding", "RotaryEmbedding"),
        ("sglang.srt.layers.rotary_embedding.rope_variant", "Llama3RotaryEmbedding", "RotaryEmbedding"),
        ("sglang.srt.layers.rotary_embedding.mrope", "YaRNScalingMRotaryEmbedding", "MRotaryEmbedding"),
        ("sglang.srt.layers.rotary_embedding.rope_variant", "Llama4VisionRotaryEmbedding", None),
        ("sglang.srt.layers.rotary_embedding.rope_variant", "DualChunkRotaryEmbedding", None),
    ],
)
def test_a_subclass_finds_the_row_of_what_it_inherits(scheduler: None, module: str, name: str, row: str | None) -> None:
    found = find(getattr(importlib.import_module(module), name))
    assert (None if found is None else found.name) == row


def test_a_subclass_that_computes_in_a_way_of_its_own_finds_none(scheduler: None) -> None:
    from sglang.srt.layers.layernorm import RMSNorm

    class Shifted(RMSNorm):
        def forward_native(self, x):  # type: ignore[no-untyped-def]
            return super().forward_native(x) + 1

    class Wrapped(RMSNorm):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return super().forward(x) + 1

    assert find(Shifted) is None
    assert find(Wrapped) is ROWS["RMSNorm"]


def test_we_know_every_block_that_scales_its_experts_itself() -> None:
    """Off SGLang's GPUs they scale: ``if not _is_cuda ...: ... *= self.routed_scaling_factor``."""
    scaling = set()
    for name, found in classes("srt/models").items():
        for node in ast.walk(found.body):
            if isinstance(node, ast.If) and "not _is_cuda" in ast.unparse(node.test):
                body = "\n".join(ast.unparse(statement) for statement in node.body)
                if "*= self.routed_scaling_factor" in body:
                    scaling.add(name)
    assert scaling == SCALING_BLOCKS
