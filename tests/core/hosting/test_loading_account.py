"""The account of a checkpoint's tensors sees what was filled, dropped and cast, however a loader writes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_dispatch.hosting.loading import allowed, refusals
from fl_dispatch.hosting.loading.account import Account
from fl_dispatch.hosting.loading.allowed import UNTAKEN, Allowed, shared_caches
from fl_dispatch.hosting.loading.origins import Storage
from fl_dispatch.hosting.loading.refusals import CheckpointError, naming, refuse_left, refuse_unfilled
from fl_dispatch.settings import Settings

FP8 = torch.float8_e4m3fn
Loader = Callable[[Tensor, Tensor], object]


class Model(nn.Module):
    """One parameter of a layer."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        found = self.layer.weight
        assert isinstance(found, Tensor)
        return found


def counted(model: Model, tensors: dict[str, Tensor], load: Callable[[str, Tensor], object]) -> Account:
    account = Account(model, "folder")
    with account.watching():
        for name, tensor in account.see(tensors.items()):
            load(name, tensor)
    return account


def _in_threads(weight: Tensor, tensor: Tensor) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(weight.data.copy_, tensor).result()


def _row_by_row(weight: Tensor, tensor: Tensor) -> None:
    for row in range(len(weight)):
        weight.data[row] = tensor[row]


def _columns(weight: Tensor, tensor: Tensor) -> None:
    for start in (0, 2):
        weight.data.narrow(1, start, 2).copy_(tensor.narrow(1, start, 2))


def _dequantized(weight: Tensor, tensor: Tensor) -> None:
    weight.data.copy_((tensor.float() * 2).to(weight.dtype))


def _through_a_buffer(weight: Tensor, tensor: Tensor) -> None:
    buffer = torch.empty_like(tensor)
    buffer.copy_(tensor)
    weight.data.copy_(torch.cat((buffer[:1], buffer[1:])))


def _swapped(weight: Tensor, tensor: Tensor) -> None:
    weight.data = tensor


def _as_bytes(weight: Tensor, tensor: Tensor) -> None:
    weight.data.view(torch.uint8).copy_(tensor.view(torch.uint8))


WAYS: dict[str, Loader] = {
    "a copy": lambda weight, tensor: weight.data.copy_(tensor),
    "a copy of the parameter's own": lambda weight, tensor: weight.copy_(tensor),
    "rows": _row_by_row,
    "columns": _columns,
    "flat elements": lambda weight, tensor: weight.data.view(-1).copy_(tensor.reshape(-1)),
    "transposed": lambda weight, tensor: weight.data.t().copy_(tensor.t()),
    "threads": _in_threads,
    "arithmetic": _dequantized,
    "a buffer": _through_a_buffer,
    "new storage": _swapped,
    "bytes": _as_bytes,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_is_filled_whichever_way_it_is_written(way: str) -> None:
    model = Model(3, 4)
    account = counted(model, {"w": torch.randn(3, 4)}, lambda _, tensor: WAYS[way](model.weight, tensor))
    assert account.unfilled(model, ()) == []
    assert account.left(()) == []
    assert not account.casts


def test_a_layer_that_reads_anothers_cache_needs_its_queries_alone() -> None:
    """Its joined projection may lack keys and values, but is not to be left whole."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Module() for _ in range(3))
    for layer in model.layers:
        layer.self_attn = nn.Module()
        layer.self_attn.qkv_proj = nn.Linear(4, 6, bias=False)
    allowed = shared_caches(SimpleNamespace(num_hidden_layers=3, num_kv_shared_layers=2))

    def load(name: str, tensor: Tensor) -> None:
        model.get_parameter(name.replace("q_proj", "qkv_proj"))[:2].detach().copy_(tensor)

    names = [f"layers.{number}.self_attn.q_proj.weight" for number in (0, 1)]
    account = counted(model, {name: torch.randn(2, 4) for name in names}, load)
    assert [found.name for found in account.unfilled(model, allowed)] == [
        "layers.0.self_attn.qkv_proj.weight",
        "layers.2.self_attn.qkv_proj.weight",
    ]
    assert shared_caches(SimpleNamespace(num_hidden_layers=3)) == ()


@pytest.mark.parametrize("way", ["rows", "columns", "flat elements", "transposed", "bytes"])
def test_half_a_parameter_is_not_filled(way: str) -> None:
    model = Model(6, 4)

    def load(_: str, tensor: Tensor) -> None:
        half = model.weight[:3]
        WAYS[way](half, tensor)

    account = counted(model, {"gate.weight": torch.randn(3, 4)}, load)
    assert account.unfilled(model, ()) == [("layer.weight", ["gate.weight"])]
    with pytest.raises(CheckpointError, match="only a part of 'weight' of the layer 'layer' is in folder, by 'gate"):
        refuse_unfilled(account, model, ())


def test_parts_of_experts_fill_their_parameter_together_and_one_that_lacks_is_seen() -> None:
    for lacking in (None, "1.up"):
        model = Model(3, 4, 5)
        parts = {f"{index}.{name}": torch.randn(2, 5) for index in range(3) for name in ("gate", "up")}
        parts.pop(lacking or "", None)

        def load(name: str, tensor: Tensor, model: Model = model) -> None:
            index, _, kind = name.partition(".")
            model.weight.data[int(index)].narrow(0, 2 * (kind == "up"), 2).copy_(tensor)

        account = counted(model, parts, load)
        assert bool(account.unfilled(model, ())) is (lacking is not None)


def test_what_a_loader_pads_is_filled_and_what_it_only_clears_is_not() -> None:
    model = Model(4, 4)

    def pad(_: str, tensor: Tensor) -> None:
        model.weight.data[:3].copy_(tensor)
        model.weight.data[3:].fill_(0)

    assert counted(model, {"w": torch.randn(3, 4)}, pad).unfilled(model, ()) == []
    account = counted(model, {"w": torch.randn(3, 4)}, lambda *_: model.weight.data.fill_(0))
    assert account.unfilled(model, ()) == [("layer.weight", [])]
    assert account.left(()) == ["w"]


def test_a_tensor_that_a_loader_reads_and_drops_is_left() -> None:
    model, kept = Model(3, 4), list[object]()
    reads: dict[str, Callable[[Tensor], object]] = {
        "compared": lambda tensor: bool((tensor == 0).all()),
        "computed": lambda tensor: tensor.float().abs().max(),
        "copied": lambda tensor: torch.empty_like(tensor).copy_(tensor),
        "kept": lambda tensor: kept.append(tensor * 2),
        "a number": lambda tensor: kept.append(tensor.max().item()),
        "a buffer": lambda tensor: model.register_buffer("extra", tensor.clone(), persistent=False),
    }
    account = counted(model, {name: torch.randn(3, 4) for name in reads}, lambda name, tensor: reads[name](tensor))
    assert account.left(()) == ["compared", "computed", "copied"]


def test_tensors_of_one_buffer_cost_no_more_each_when_there_are_many() -> None:
    def steps(count: int) -> int:
        buffer, lines = torch.zeros(count * 4), 0
        storage = Storage(buffer.untyped_storage())

        def count_lines(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count_lines

        before = sys.gettrace()
        sys.settrace(count_lines)
        try:
            for index in range(count):
                storage.put(str(index), buffer[4 * index : 4 * index + 4])
                storage.origin(buffer[2 * index : 2 * index + 2])
        finally:
            sys.settrace(before)
        return lines

    assert steps(400) < 5 * steps(100)


def test_the_last_tensors_of_a_buffer_count_in_any_order_of_ranges() -> None:
    buffer = torch.zeros(64, dtype=torch.uint8)
    draw = random.Random(0)
    for _ in range(200):
        storage, expected = Storage(buffer.untyped_storage()), dict[tuple[int, int], set[str]]()
        for index in range(12):
            start = draw.randrange(60)
            end = draw.randrange(start + 1, 64)
            overlapping = [span for span in expected if span != (start, end) and span[0] < end and start < span[1]]
            for span in overlapping:
                del expected[span]
            expected.setdefault((start, end), set()).add(str(index))
            storage.put(str(index), buffer[start:end])
        for place in range(64):
            names = set[str]().union(*(names for (start, end), names in expected.items() if start <= place < end))
            assert storage.origin(buffer[place : place + 1]).names == names


@pytest.mark.parametrize(
    ("quantized", "dtype", "advises"),
    [(False, torch.bfloat16, False), (True, torch.bfloat16, True), (False, FP8, True), (False, torch.int32, True)],
)
def test_advice_about_quantization_is_for_quantized_checkpoints(
    quantized: bool, dtype: torch.dtype, advises: bool
) -> None:
    account = Account(Model(4), "folder", quantized)
    list(account.see([("w", torch.zeros(4).to(dtype))]))
    with pytest.raises(CheckpointError, match="compare config.json with the files") as caught:
        refuse_left(account, account.left(()))
    assert ("quantization_config" in str(caught.value)) is advises


def test_a_tensor_that_a_host_drops_though_its_parameter_has_that_name_is_the_hosts_fault() -> None:
    model = Model(4)
    account = counted(model, {"layer.weight": torch.ones(4)}, lambda *_: None)
    with pytest.raises(
        CheckpointError, match="class of this model drops 'layer.weight' of folder, so 'weight' of the lay"
    ):
        refuse_unfilled(account, model, ())


def test_a_number_that_goes_through_python_is_taken() -> None:
    model = Model(1)
    account = counted(
        model, {"s": torch.tensor(2.0)}, lambda _, tensor: model.weight.data.fill_(tensor.item()) and None
    )
    assert account.unfilled(model, ()) == []
    assert account.left(()) == []


def test_a_dropped_tensor_is_left_and_tensors_that_share_a_buffer_are_told_apart() -> None:
    buffer = torch.randn(24)
    model = Model(3, 4)
    parts = {"taken": buffer[:12].view(3, 4), "dropped": buffer[12:].view(3, 4)}

    def load(name: str, tensor: Tensor) -> None:
        if name == "taken":
            model.weight.data.copy_(tensor)

    account = counted(model, parts, load)
    assert account.left(()) == ["dropped"]
    assert account.left((Allowed("dropp.*", "it is a test"),)) == []
    with pytest.raises(CheckpointError, match="nothing in the model made use of 'dropped' of folder.*UNUSED_TENSORS"):
        refuse_left(account, account.left(()))


def test_a_tensor_that_the_user_excuses_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    account = counted(Model(3, 4), {"a.extra.weight": torch.ones(3), "b.weight": torch.ones(3)}, lambda *_: None)
    monkeypatch.setattr(refusals, "get_settings", lambda: Settings(unused_tensors=frozenset({"*.extra.*"})))
    with caplog.at_level("WARNING", logger="fl_dispatch"), pytest.raises(CheckpointError, match="use of 'b.weight' of"):
        refuse_left(account, account.left(()))
    (said,) = (record.getMessage() for record in caplog.records)
    assert (
        said
        == "1 tensors of folder are left unused, such as 'a.extra.weight', because VLLM_FL_UNUSED_TENSORS names them"
    )


@pytest.mark.parametrize(
    ("stored", "dtype", "is_cast"),
    [
        (FP8, torch.int8, True),
        (torch.int8, FP8, True),
        (FP8, torch.bfloat16, True),
        (torch.bfloat16, FP8, True),
        (torch.int32, torch.float32, True),
        (torch.float8_e5m2, FP8, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float16, False),
        (torch.int64, torch.int32, False),
        (FP8, FP8, False),
        (torch.float8_e8m0fnu, torch.float32, False),
    ],
)
def test_a_silent_cast_between_kinds_of_numbers_is_seen(stored: torch.dtype, dtype: torch.dtype, is_cast: bool) -> None:
    model = Model(4, 4, dtype=dtype)

    def cast_before(_: str, tensor: Tensor) -> None:
        model.weight.data.copy_(tensor.to(dtype))

    for load in (cast_before, lambda _, tensor: model.weight.data.copy_(tensor)):
        account = counted(model, {"w": torch.ones(4, 4).to(stored)}, load)
        assert bool(account.casts) is is_cast
        if is_cast:
            words = f"'w' of folder has numbers of {stored}".replace("torch.", "")
            with pytest.raises(CheckpointError, match=words):
                refuse_unfilled(account, model, ())


def test_numbers_that_a_loader_computes_are_no_cast() -> None:
    model = Model(4, 4, dtype=torch.bfloat16)
    account = counted(model, {"w": torch.ones(4, 4).to(FP8)}, lambda _, tensor: _dequantized(model.weight, tensor))
    assert not account.casts


def test_a_buffer_that_a_reader_fills_again_has_the_last_tensors() -> None:
    buffer, model = torch.ones(8), Model(6)
    account = Account(model, "folder")
    with account.watching():
        for name, tensor in account.see((name, buffer[:size]) for name, size in (("dropped", 8), ("taken", 6))):
            if name == "taken":
                model.weight.data.copy_(tensor)
    assert account.left(()) == ["dropped"]


def test_pools_are_watched_until_the_last_of_overlapping_loads_has_ended() -> None:
    submit, first, second = ThreadPoolExecutor.submit, Account(Model(2), "one"), Account(Model(2), "two")
    begun, ended = first.watching(), second.watching()
    begun.__enter__()
    ended.__enter__()
    ended.__exit__(None, None, None)
    assert ThreadPoolExecutor.submit is not submit
    begun.__exit__(None, None, None)
    assert ThreadPoolExecutor.submit is submit


def test_what_a_class_declares_unused_may_be_left() -> None:
    account = counted(Model(2), {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}, lambda *_: None)
    account.dropped.add("a.weight")
    assert account.left(()) == ["b.weight"]


def test_what_transformers_ignores_may_be_left() -> None:
    config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM", "NoSuchClass"])
    account = counted(Model(2), {"model.layers.61.x.weight": torch.ones(2)}, lambda *_: None)
    assert account.left(())
    assert account.left(allowed.ignored(config)) == []


def test_a_tied_head_and_biases_of_zeros_may_be_left_in_files_without_names() -> None:
    account = counted(Model(2), {"lm_head.weight": torch.ones(2), "a.bias": torch.zeros(2)}, lambda *_: None)
    assert account.left(UNTAKEN) == []  # pytorch_model.bin


def test_a_number_that_a_loader_looked_at_fills_no_parameter() -> None:
    model = Model(2)

    def look(_: str, tensor: Tensor) -> None:
        tensor.sum().item()
        model.weight.data.fill_(0)

    assert counted(model, {"flag": torch.ones(2)}, look).unfilled(model, ())


def test_a_tensor_may_be_left_by_any_rule_that_it_meets(tmp_path: Path) -> None:
    model = Model(2)
    tensors = {"layer.weight": torch.ones(2), "vision_tower.fc1.bias": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    account = counted(model, tensors, lambda name, tensor: name[0] == "l" and model.weight.data.copy_(tensor))
    account.files = [str(tmp_path / "model.safetensors")]
    assert account.left(UNTAKEN) == []  # a bias that is not zero, of a tower


def test_biases_of_zeros_may_be_left_and_others_not(tmp_path: Path) -> None:
    model = Model(2)
    tensors = {"layer.weight": torch.ones(2), "a.bias": torch.zeros(2), "b.bias": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")

    def load(name: str, tensor: Tensor) -> None:
        if name == "layer.weight":
            model.weight.data.copy_(tensor)

    account = counted(model, tensors, load)
    account.files.append(str(tmp_path / "model.safetensors"))
    assert account.left(UNTAKEN) == ["b.bias"]
    with pytest.raises(CheckpointError, match=r"'b.bias' of .*model\.safetensors: the answers"):
        refuse_left(account, account.left(UNTAKEN))


def test_a_loaders_own_error_is_a_sentence_that_names_the_tensor() -> None:
    model = Model(3, 4)
    account = Account(model, "folder")

    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            assert tensor.shape == model.weight.shape

    with (
        pytest.raises(CheckpointError, match=r"'w' of folder \(float32, 2×4\) cannot be loaded .*AssertionError"),
        naming(account),
        account.watching(),
    ):
        load(account.see([("w", torch.randn(2, 4))]))


def test_a_host_that_runs_out_of_memory_says_so_itself() -> None:
    account = Account(Model(1), "folder")
    list(account.see([("w", torch.ones(1))]))
    with pytest.raises(torch.OutOfMemoryError), naming(account):
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(("name", "fits"), [("layer.weight", True), ("gate.weight", False)])
def test_one_scale_of_layers_that_a_file_has_joined_is_enough(name: str, fits: bool) -> None:
    model = Model(3)
    account = counted(model, {name: torch.ones(1)}, lambda _, tensor: model.weight.data[:1].copy_(tensor))
    assert (account.unfilled(model, ()) == []) is fits


def test_an_excuse_counts_for_what_nothing_fills_and_not_for_a_half() -> None:
    excuse = (Allowed(r".*\.weight", "it is a test"),)
    for names in ([], ["half"]):
        model, tensors = Model(4), dict.fromkeys(names, torch.ones(2))

        def load(_: str, tensor: Tensor, model: Model = model) -> None:
            model.weight.data[:2].copy_(tensor)

        assert (counted(model, tensors, load).unfilled(model, excuse) == []) is not bool(names)


def test_two_parameters_of_one_storage_are_filled_together() -> None:
    model = Model(4)
    model.layer.other = nn.Parameter(model.weight.data, requires_grad=False)
    account = counted(model, {"w": torch.ones(4)}, lambda _, tensor: model.weight.data.copy_(tensor))
    assert account.unfilled(model, ()) == []


def test_a_buffer_keeps_its_constructors_value_and_is_not_filled_by_half() -> None:
    for names, fits in (([], True), (["half"], False)):
        model = Model(4)
        model.layer.register_buffer("factor", torch.ones(4))
        factor = model.layer.factor
        assert isinstance(factor, Tensor)

        def load(name: str, tensor: Tensor, model: Model = model, factor: Tensor = factor) -> None:
            (factor[:2] if name == "half" else model.weight.data).copy_(tensor)

        tensors = {"w": torch.ones(4), **dict.fromkeys(names, torch.ones(2))}
        assert (counted(model, tensors, load).unfilled(model, ()) == []) is fits


def test_scales_of_a_cache_may_be_left_where_the_model_has_no_place_for_any() -> None:
    for quantized in (False, True):
        model = Model(1)
        if quantized:
            model.layer.k_scale = nn.Parameter(torch.ones(1), requires_grad=False)
        account = counted(model, {"layer.attn.k_scale": torch.ones(1)}, lambda *_: None)
        assert account.left(()) == (["layer.attn.k_scale"] if quantized else [])
