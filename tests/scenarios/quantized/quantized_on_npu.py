"""Quantized checkpoints in engines on ``npu:0``, dense ones and experts: all by ``vendor.ascend``.

Module :mod:`half_on_npu` explains the comparison of results in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import quantized_checkpoints as checkpoints
from fl_dispatch.cli import small_model
from fl_dispatch.cli.half_precision import COMPARED
from half_on_npu import FEW, HEADS, REFUSED_EXPERTS, as_near_as_dequantized, expert_kernels, quantized_kernels
from host_engines import Engine, Host, Pass, Scenario, Served, clean, ran
from quantized_checkpoints import SCHEMES
from quantized_engines import QuantizedModels
from quantized_mixture import LAYERS, experts_kernel, mixture, operator
from running import PROMPTS

HALF = {"dtype": "float16"}
VENDOR = "vendor.ascend"


class QuantizedOnNPU(Scenario):
    """Engines with the drawn schemes: a right pass, then one with each wrong kernel."""

    DRAWN: ClassVar[Sequence[str]]
    OTHERS: ClassVar[set[str]] = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
    """Operators that the model calls in addition to those of its scheme."""
    REFERENCES: ClassVar[set[str]] = set()
    """Further operators, which the chip does not have."""
    PRODUCTS: ClassVar[int] = QuantizedModels.PRODUCTS
    """Number of quantized layers."""
    COMPARED: ClassVar[float] = 1.0
    """Share of the tokens for which the bounds hold."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        kernels = [(name, kernel) for name in self.DRAWN for kernel in self.kernels(name)]
        return {"name,kernel": kernels, "name": self.DRAWN}

    def kernels(self, name: str) -> Sequence[str]:
        """Return the chip's kernels that a scheme runs."""
        return quantized_kernels(name)

    def operators(self, name: str) -> set[str]:
        """Return the operators of a scheme."""
        return {*SCHEMES[name].operators}

    def counted(self, name: str, host: Host) -> Mapping[str, int]:
        """Return our kernel → the number of layers with it."""
        return {host.layers.get(name, SCHEMES[name].layer): self.PRODUCTS}

    @pytest.fixture(scope="class")
    def model(self) -> Path:
        """Return the checkpoint before quantization."""
        return small_model.CHECKPOINT

    @pytest.fixture(scope="class")
    def start(self, host: Host, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
        """Return a function that starts an engine with a scheme and its passes."""
        folder = tmp_path_factory.mktemp("quantized")

        def of(name: str, *asked: Pass) -> Any:
            written = checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=model)
            return host.serve(Engine(written, asked, HALF))[0]

        return of

    @pytest.fixture(scope="class")
    def served(self, start: Callable[..., Any]) -> Callable[[str], Served]:
        wrong = {name: [Pass(max_tokens=FEW, kernel=kernel) for kernel in self.kernels(name)] for name in self.DRAWN}
        started = {name: start(name, Pass(scores=True), *wrong[name]) for name in self.DRAWN}
        return lambda name: started[name].result()

    def test_it_is_as_near_to_the_dequantized_network_as_hugging_faces(
        self, name: str, served: Callable[[str], Served], model: Path
    ) -> None:
        assert as_near_as_dequantized(SCHEMES[name], *served(name).answers[0].scored(), model, self.COMPARED)

    def test_all_is_the_vendors_but_what_no_kernel_computes(
        self, name: str, host: Host, served: Callable[[str], Served]
    ) -> None:
        for report in served(name).reports:
            references = {one: {"reference.torch"} for one in self.REFERENCES}
            assert ran(report) == {**{one: {VENDOR} for one in self.OTHERS | self.operators(name)}, **references}
            expected = self.counted(name, host)
            assert {kernel: report["layers"].get(kernel) for kernel in expected} == expected
            assert clean(report, host)

    def test_a_wrong_kernel_changes_the_tokens(self, name: str, kernel: str, served: Callable[[str], Served]) -> None:
        right, *wrong = served(name).answers
        answer = wrong[self.kernels(name).index(kernel)]
        assert answer.cached == [0] * len(PROMPTS), "it would read what a right kernel wrote"
        assert answer.kernels is None or answer.kernels[kernel] > 0
        assert answer.tokens != [tokens[:FEW] for tokens in right.tokens]


class QuantizedExpertsOnNPU(QuantizedOnNPU):
    """Engines with a mixture of experts; ``REFUSED`` has the schemes that no kernel takes.

    Rounding may change a close choice of experts, so the bounds hold for most of the tokens.
    """

    COMPARED: ClassVar[float] = COMPARED
    REFUSED: ClassVar[Sequence[str]]
    OTHERS: ClassVar[set[str]] = {"rms_norm", "rotary_embedding", "kv_cache_write", "paged_attention", "topk_softmax"}

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"refused": self.REFUSED, **super().cases()}

    def kernels(self, name: str) -> Sequence[str]:
        return expert_kernels(name)

    def operators(self, name: str) -> set[str]:
        return {*SCHEMES[name].operators, operator(SCHEMES[name])}

    def counted(self, name: str, host: Host) -> Mapping[str, int]:
        return {experts_kernel(name): LAYERS}

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return mixture(tmp_path_factory.mktemp("experts") / "whole", **HEADS)

    def test_experts_that_no_kernel_takes_end_the_start_with_the_reason(
        self, refused: str, host: Host, start: Callable[..., Any]
    ) -> None:
        said = f"{host.plugin} does not support these experts .*{REFUSED_EXPERTS[refused]}"
        with pytest.raises(AssertionError, match=said):
            start(refused).result()
