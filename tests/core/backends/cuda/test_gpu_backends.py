"""Backends for NVIDIA GPUs on a machine without one, and how a chip gets its own defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fl_dispatch import BackendImplKind, config, get_default_manager, match_token
from fl_dispatch import devices as device
from fl_dispatch.backends.flaggems import library as flaggems
from fl_dispatch.backends.flaggems.flaggems import FlagGemsBackend
from fl_dispatch.backends.vendor.cuda import library
from fl_dispatch.backends.vendor.cuda import register_ops as cuda
from fl_dispatch.backends.vendor.cuda.impl import attention, deep_gemm, experts, quantization
from fl_dispatch.devices import nvml

IDS = {
    "vendor.cuda",
    "vendor.cuda.cutlass",
    "vendor.cuda.cutlass.blocks",
    "vendor.cuda.deep_gemm",
    "vendor.cuda.fa3",
    "vendor.cuda.machete",
    "vendor.cuda.marlin",
    "vendor.cuda.sglang_fa3",
    "vendor.cuda.triton",
    "default.flagos",
}
OPERATORS = {
    **{name: {row.op_name for row in cuda.ROWS if row.impl_id == name} for name in IDS},
    "default.flagos": {
        impl.op_name for impl in FlagGemsBackend().implementations(BackendImplKind.DEFAULT, "default.flagos")
    },
}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.mark.parametrize("impl_id", sorted(IDS))
def test_every_operator_of_a_backend_is_registered_for_its_device_only(impl_id: str) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    registered = {op for op in manager.registry.list_operators() if manager.registry.get_implementation(op, impl_id)}
    assert registered
    assert registered == OPERATORS[impl_id]
    for op in registered:
        impl = manager.registry.get_implementation(op, impl_id)
        assert impl is not None
        own = ("cuda",) if impl.vendor else (device.detect_device().torch_type,)
        assert (impl.device_types, impl.opaque) == (own, True)
        assert impl.supports is not None


@needs_no_gpu
@pytest.mark.parametrize("impl_id", sorted(IDS))
def test_without_a_gpu_a_backend_says_why_it_is_not_available(impl_id: str) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    for op in OPERATORS[impl_id]:
        impl = manager.registry.get_implementation(op, impl_id)
        assert impl is not None
        available, why = impl.availability()
        assert not available
        assert "GPU" in why or "not installed" in why


def test_a_tensor_on_the_cpu_is_declined_with_a_reason() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    for op, impl_id in (
        ("silu_and_mul", "vendor.cuda"),
        ("rms_norm", "vendor.cuda"),
        ("silu_and_mul", "default.flagos"),
    ):
        impl = manager.registry.get_implementation(op, impl_id)
        assert impl is not None
        assert impl.supports is not None
        rest = {"residual": None, "weight": None} if op == "rms_norm" else {}
        assert "cpu" in str(impl.supports(x=torch.ones(2, 8), **rest)).lower()


@needs_no_gpu
def test_a_library_that_is_for_cpus_is_not_taken_for_loaded() -> None:
    assert not any(part.is_loaded() for part in (library.GENERAL, library.EXPERTS, library.ATTENTION))


@pytest.mark.parametrize("package", ["vllm", "sgl_kernel"])
def test_a_package_without_compiled_operators_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "CUDA", replace(device.CUDA, detect=lambda: True, capability=lambda index: (9, 0)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").touch()
    part = replace(library.GENERAL, mark="no_such_operator", package=package)
    assert library.why_unavailable(part) == f"the {package} in {folder} has no _C_stable_libtorch.abi3.so"
    (folder / "_C.abi3.so").write_bytes(b"no library")
    assert "does not load" in library.why_unavailable(replace(part, mark="none_either"))
    assert library.why_unavailable(replace(part, package="no_such_package")) == "no_such_package is not installed"


def test_an_operator_with_other_arguments_is_not_called() -> None:
    torch.library.define("fl_test_library::fwd", "(Tensor q, Tensor? sinks) -> Tensor")
    part = replace(library.SGLANG_ATTENTION, namespace="fl_test_library")
    assert part.takes_others() == "its fwd takes q, sinks"
    assert replace(part, arguments=("q", "sinks")).takes_others() == ""


HALF, COUNTS = torch.ones(2, 4, 8, dtype=torch.bfloat16), torch.tensor([0, 2], dtype=torch.int32)
FIRST = "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out"
"""As sglang-kernel 0.4.10 and vLLM 0.33 declare their operators."""
LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k"
PLACES = "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k"
ROTARY = "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary"
SCALES = "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? softmax_scale"
SEEN = "bool is_causal, int window_size_left, int window_size_right"
HOW = "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin"
COMMON = f"{FIRST}, {LENGTHS}, {PLACES}, {ROTARY}, {SCALES}, {SEEN}"
OF_VLLM = f"{COMMON}, float softcap, {HOW}, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
OF_SGLANG = (
    f"{COMMON}, int attention_chunk, float softcap, {HOW}, Tensor? sinks, Tensor? sparse_mask_fine, bool only_qv"
)


@needs_no_gpu
@pytest.mark.parametrize(
    ("namespace", "schema", "call", "sinks"),
    [
        ("_vllm_fa3_C", OF_VLLM, attention.paged_attention, "s_aux"),
        ("sgl_kernel", OF_SGLANG, attention.sglang_paged_attention, "sinks"),
    ],
)
def test_flash_attention_gets_each_value_by_its_name(
    namespace: str, schema: str, call: Callable[..., Any], sinks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = torch._C.parse_schema(f"own::fwd({schema}) -> ()")
    got: dict[str, Any] = {}

    def fwd(*values: Any) -> None:
        got.update(zip((argument.name for argument in known.arguments), values, strict=True))

    monkeypatch.setattr(torch.ops, namespace, SimpleNamespace(fwd=fwd))
    cache, table, sink, out = HALF[None], COUNTS[None], torch.ones(4, dtype=torch.bfloat16), torch.empty_like(HALF)
    options = {"out": out, "causal": False, "sliding_window": 5, "softcap": 3.0, "sinks": sink}
    assert call(HALF, cache, cache + 1, table, COUNTS, COUNTS[1:], 7, 9, 0.5, **options) is out
    given = {
        "q": HALF, "k": cache, "out": out, "cu_seqlens_q": COUNTS, "max_seqlen_q": 7, "max_seqlen_k": 9,
        "page_table": table, "softmax_scale": 0.5, "is_causal": False, "window_size_left": 4, "window_size_right": 4,
        "softcap": 3.0, sinks: sink, "num_splits": 0, "sm_margin": 0,
    }  # fmt: skip
    same = {name for name in given if got[name] is given[name] or got[name] == given[name]}
    assert same == {*given}
    assert torch.equal(got["v"], cache + 1)
    assert torch.equal(got["seqused_k"], COUNTS[1:])
    rest = {name: value for name, value in got.items() if name not in {*given, "v", "seqused_k"} and value}
    assert rest == {"is_rotary_interleaved": True} | ({"cp_world_size": 1} if sinks == "s_aux" else {})
    if sinks == "sinks":
        assert library.SGLANG_ATTENTION.arguments == tuple(got)


ROUTED = "Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output"
"""As vLLM declares its routers, before 0.32 without the padding."""
PADDED = {"fl_test_routers": "", "fl_test_padded_routers": ", Tensor? is_padding"}


@pytest.mark.parametrize("namespace", PADDED)
def test_routers_are_called_as_each_version_declares_them(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = {}

    def route(weights: torch.Tensor, ids: torch.Tensor, room: torch.Tensor, logits: torch.Tensor, *rest: Any) -> None:
        weights.copy_(logits[:, :2])
        ids.fill_(len(got))
        got[len(got)] = rest

    with torch.library._scoped_library(namespace, "DEF") as made:
        for name, factor in (("topk_softmax", ""), ("topk_sigmoid", ", float routed_scaling_factor")):
            made.define(f"{name}({ROUTED}, bool renormalize, Tensor? bias{factor}{PADDED[namespace]}) -> ()")
            made.impl(name, route, "CPU")
        monkeypatch.setattr(torch.ops, "_moe_C", getattr(torch.ops, namespace))
        experts._router.cache_clear()
        logits = torch.randn(3, 8)
        for at, router in enumerate((experts.topk_softmax, experts.topk_sigmoid)):
            weights, ids = router(logits, 2, True)
            assert torch.equal(weights, logits[:, :2])
            assert ids.tolist() == [[at, at]] * 3
    experts._router.cache_clear()
    padding = [None] if PADDED[namespace] else []
    assert [list(rest) for rest in got.values()] == [[True, None, *padding], [True, None, 1.0, *padding]]


GROUP = 128


def blocks(rows: int) -> tuple[torch.Tensor, ...]:
    """Quantized rows ``[rows, 256]`` and their scales, a weight ``[384, 256]`` and those of its blocks, a bias."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(count, 256, generator=generator).to(torch.float8_e4m3fn) for count in (rows, 384))
    scales = (torch.rand(*shape, generator=generator) for shape in ((rows, 2), (3, 2)))
    return x, next(scales), weight, next(scales), torch.randn(384, generator=generator).bfloat16()


def product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    rows, columns = (
        one.double() * scale.double().repeat_interleave(GROUP, -1)
        for one, scale in ((x, x_scale), (weight, weight_scale.repeat_interleave(GROUP, 0)))
    )
    return (rows @ columns.t()).bfloat16() + bias


def spread(rows: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """The same product in ways that a caller may have it: rows and scales apart, scales turned, another dimension."""
    x, x_scale, *rest = given = blocks(rows)
    weight, weight_scale, bias = rest
    apart = torch.cat((x, x), -1)[:, : x.shape[1]]
    turned = weight_scale.t().contiguous().t()
    return {
        "as it lies": given,
        "apart": (apart, x_scale.repeat(1, 2)[:, :2], weight, turned, bias),
        "3-d": (x.unflatten(0, (-1, 1)), x_scale.unflatten(0, (-1, 1)), *rest),
    }


@pytest.mark.parametrize("how", spread(1))
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 30])
def test_cutlass_multiplies_blocks_of_rows_in_fours(rows: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are added stay out of the result, whatever they hold."""
    asked = []

    def multiply(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, *rest: Any) -> None:
        (weight_scale, bias) = rest
        asked.append((len(x), len(out), len(x_scale), x_scale.stride(0)))
        assert bias is None
        assert all(one.is_contiguous() for one in (x, out, x_scale.t(), weight.t(), weight_scale.t()))
        out.copy_(product(x, x_scale, weight.t(), weight_scale.t(), torch.zeros(384)))

    empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        made = empty(self, *args, **options)
        return made.view(torch.uint8).fill_(255).view(made.dtype)  # NaN in fp8 and in float32

    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(cutlass_scaled_mm=multiply))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    given = spread(rows)[how]
    found = quantization.scaled_blocks(*given, block_size=GROUP)
    assert torch.equal(found, product(*blocks(rows)).view(*given[0].shape[:-1], 384))
    whole = -(-rows // 4) * 4
    assert asked == ([(whole, whole, whole, 1)] if rows else [])


@pytest.mark.parametrize("supports", [quantization.supports_scaled_blocks, deep_gemm.supports])
def test_products_of_blocks_take_fp8_alone(
    supports: Callable[..., bool | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_multiplies", lambda *args: True)
    with FakeTensorMode(allow_non_fake_inputs=True):

        def ask(kind: torch.dtype, dtype: str = "bfloat16", block: int = GROUP, columns: int = 384) -> bool | str:
            x, weight = (torch.empty(count, 256, device="cuda").to(kind) for count in (5, columns))
            scales = (torch.empty(*shape, device="cuda") for shape in ((5, 2), (3, 2)))
            return supports(x, next(scales), weight, next(scales), None, dtype, block)

        assert ask(torch.float8_e4m3fn) is True
        assert "fn only" in str(ask(torch.int8))
        assert "not both int8 or" in str(ask(torch.bfloat16))
        assert "no blocks" in str(ask(torch.float8_e4m3fn, block=0))
        assert "128 only" in str(ask(torch.float8_e4m3fn, block=64))
        assert "multiples of 128" in str(ask(torch.float8_e4m3fn, columns=320))
        assert "float32" in str(ask(torch.float8_e4m3fn, "float32"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for modules, on a machine with a GPU of compute capability 9."""
    found = (library.deep_gemm, library.why_no_deep_gemm, deep_gemm._kernel)
    monkeypatch.setattr(library, "CUDA", replace(device.CUDA, detect=lambda: True, capability=lambda index: (9, 0)))
    monkeypatch.setattr(library, "DEEP_GEMM", ("no_such_gemm", "fl_test_host.third_party.gemm"))
    monkeypatch.syspath_prepend(tmp_path)
    for asked in found:
        asked.cache_clear()
    yield tmp_path
    for asked in found:
        asked.cache_clear()


def program(folder: Path, mode: int = 0o755) -> Path:
    (folder / "bin").mkdir(parents=True)
    path = folder / "bin" / "nvcc"
    path.touch(mode)
    return path


def test_deep_gemm_says_what_it_lacks(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        library.deep_gemm.cache_clear()
        library.why_no_deep_gemm.cache_clear()
        return library.why_no_deep_gemm()

    module = hopper / "fl_test_host" / "third_party" / "gemm"
    module.mkdir(parents=True)
    (hopper / "fl_test_host" / "__init__.py").touch()
    assert why() == "neither no_such_gemm nor fl_test_host.third_party.gemm is installed"
    (module / "__init__.py").write_text("raise SystemExit('nothing imports it to find it')")
    (module / "_C.py").touch()
    assert why() == "neither no_such_gemm nor fl_test_host.third_party.gemm is installed"
    (module / "_C_extension.abi3.so").touch()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(hopper))
    monkeypatch.setattr(library, "USUAL_HOME", str(hopper / "usual"))
    no_program = f"it compiles its kernels with nvcc, and {hopper}/usual/bin/nvcc is no program"
    assert why() == no_program
    usual = program(hopper / "usual", 0o644)
    assert why() == no_program
    usual.chmod(0o755)
    assert why() == ""
    monkeypatch.setenv("CUDA_PATH", str(hopper / "other"))
    assert why() == f"it compiles its kernels with nvcc, and {hopper}/other/bin/nvcc is no program"
    program(hopper / "other")
    assert why() == ""
    monkeypatch.setenv("CUDA_HOME", str(hopper))
    assert "is no program" in why()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name)
    usual.unlink()
    monkeypatch.setenv("PATH", str(hopper / "other" / "bin"))
    assert why() == ""
    monkeypatch.setattr(library, "CUDA", replace(device.CUDA, detect=lambda: True, capability=lambda index: (10, 0)))
    assert why() == "its scales are float32 on compute capability 9 alone, this GPU has 10"


def test_deep_gemm_is_the_first_module_that_can_be_imported(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "DEEP_GEMM", ("fl_broken_gemm", "fl_whole_gemm"))
    for name, text in (("fl_broken_gemm", "import fl_no_such_extension"), ("fl_whole_gemm", "fp8_gemm_nt = print")):
        (hopper / name).mkdir()
        (hopper / name / "__init__.py").write_text(text)
    assert library.deep_gemm() == ("fl_broken_gemm", "fl_whole_gemm")
    assert deep_gemm._kernel() is print
    deep_gemm._kernel.cache_clear()
    (hopper / "fl_broken_gemm" / "__init__.py").write_text("fp8_gemm_nt = repr")
    monkeypatch.delitem(sys.modules, "fl_broken_gemm", raising=False)
    assert deep_gemm._kernel() is repr


@pytest.mark.parametrize("how", spread(1))
@pytest.mark.parametrize("rows", [0, 1, 30])
def test_deep_gemm_multiplies_scales_as_they_are(rows: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(x: Any, weight: Any, out: torch.Tensor, *, disable_ue8m0_cast: bool) -> None:
        assert disable_ue8m0_cast
        assert len(x[0]) == len(x[1]) == len(out) > 0
        assert all(one.is_contiguous() and one.dim() == 2 for one in (*x, *weight, out))
        out.copy_(product(*x, *weight, torch.zeros(384)))

    monkeypatch.setattr(deep_gemm, "_kernel", lambda: multiply)
    given = spread(rows)[how]
    found = deep_gemm.scaled_linear(*given, block_size=GROUP)
    assert torch.equal(found, product(*blocks(rows)).view(*given[0].shape[:-1], 384))


def test_deep_gemm_is_taken_by_its_name_alone() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    impl = manager.registry.get_implementation("scaled_linear", "vendor.cuda.deep_gemm")
    assert impl is not None
    assert not any(match_token(impl, token) for token in ("vendor", "vendor:cuda", "flagos"))
    assert match_token(impl, "impl:vendor.cuda.deep_gemm")


def test_kernels_for_another_capability_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "CUDA", replace(device.CUDA, detect=lambda: True, capability=lambda index: (8, 0)))
    part = replace(library.ATTENTION, mark="for_another")
    assert library.why_unavailable(part) == "the kernels are for compute capability 9, this GPU has 8"


def test_looking_for_flaggems_imports_nothing() -> None:
    import sys

    flaggems.why_unavailable()
    assert "flag_gems" not in sys.modules


@pytest.mark.parametrize(
    ("gems", "triton", "served"),
    [
        ("5.0.2", "3.6.0", True),
        ("5.0.2", "3.7.1", False),
        ("5.0.2", "4.0", False),
        ("5.1", "3.7.1", True),
        ("", "", True),
    ],
)
def test_flaggems_is_not_launched_with_a_triton_that_ends_the_process(
    gems: str, triton: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"flag_gems": gems, "triton": triton}
    monkeypatch.setattr(flaggems.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(flaggems.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    flaggems.why_missing.cache_clear()
    why = flaggems.why_missing()
    flaggems.why_missing.cache_clear()
    assert why == (
        "" if served else f"FlagGems {gems} ends the process with Triton {triton}: its launcher knows Triton up to 3.6"
    )


@needs_no_gpu
def test_without_nvidias_library_a_gpu_is_an_error_that_says_so() -> None:
    with pytest.raises(nvml.NvmlError):
        nvml.query(0)


@pytest.mark.parametrize(
    ("chip", "expected"),
    [
        ("NVIDIA H200", "cuda-h200"),
        ("NVIDIA H200 NVL", "cuda-h200"),
        ("NVIDIA H100 80GB HBM3", "cuda-h100"),
        ("NVIDIA A100-SXM4-80GB", "cuda"),
        ("H2000", "cuda"),
    ],
)
def test_a_chip_with_a_file_of_its_own_gets_it(monkeypatch: pytest.MonkeyPatch, chip: str, expected: str) -> None:
    spec = replace(device.CUDA, device_name=lambda index: chip)
    monkeypatch.setattr(device, "detect_device", lambda: spec)
    assert config.detect_platform() == expected


def test_a_device_without_such_files_is_not_asked_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr(device, "detect_device", lambda: replace(device.ASCEND, device_name=refuse))
    assert config.detect_platform() == "ascend"
