"""Our writer of ``compressed-tensors`` checkpoints writes what the library of that name does, which reads them back.

The library gets the model with our scales and zero points, because every quantizer chooses those by rules of its own;
what it makes of them is the format.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PROMPTS, start_features
from safetensors.torch import load_file

import quantized_checkpoints as checkpoints
from fl_dispatch.cli import small_model
from quantized_checkpoints import SCHEMES
from quantized_network import answered, computed, distance, network
from running import reference_network
from sampling import drawn

pytest.importorskip("compressed_tensors")
NAMES = [name for name in SCHEMES if name.startswith("compressed-tensors")]
DRAWN = drawn(NAMES, 2, "checkpoints of the library")
each_scheme = pytest.mark.parametrize("name", DRAWN)
OTHER_FORMATS = {"compressed-tensors W8A16 fp8": "naive-quantized"}
"""Names that the library has for a format where ours has another; vLLM reads both."""
IN_BLOCKS = "compressed-tensors W8A8 fp8, blocks of 128"
"""Not decompressed by the library, which takes the one column of scales of rows of 128 elements for a scale a row."""
FEW = PROMPTS[:2]


def zero_points(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Ours, by the rule of the writer, as the library has them: 0 is the middle of the numbers."""
    low = weight.view(*scale.shape, -1).amin(-1).clamp(max=0)
    return ((-low / scale.float()).round().clamp(0, 15) - 8).to(torch.int8)


def as_number(scale: torch.Tensor) -> torch.Tensor:
    """A scale as the library has it before it compresses: those of one byte are float32."""
    if scale.dtype is torch.uint8:
        return (scale.float() - 127).exp2()
    return scale.float() if scale.dtype is torch.float8_e4m3fn else scale


def write_by_the_library(name: str, folder: Path) -> Path:
    """The small model's checkpoint as the library compresses it with our scales and zero points."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    scheme = SCHEMES[name]
    model = reference_network(small_model.CHECKPOINT, torch.float32)
    config = QuantizationConfig.model_validate({**scheme.config, "quantization_status": "frozen"})
    apply_quantization_config(model, config)
    for product, module in model.named_modules():
        if checkpoints.is_product(f"{product}.weight"):
            ours, _ = scheme.write(module.weight.data)
            for key in ("weight_scale", "input_scale", "weight_global_scale", "input_global_scale"):
                if key in ours:
                    getattr(module, key).data = as_number(ours[key])
            if "weight_zero_point" in ours:
                module.weight_zero_point.data = zero_points(module.weight.data, ours["weight_scale"])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    for file in small_model.CHECKPOINT.glob("token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Scheme → our checkpoint, and the library's."""
    folder = tmp_path_factory.mktemp("compressed")

    def write(name: str) -> tuple[Path, Path]:
        place = folder / name.replace(" ", "-")
        place.mkdir()
        ours = checkpoints.write_checkpoint(place / "ours", SCHEMES[name])
        return ours, write_by_the_library(name, place / "theirs")

    return cache(write)


@each_scheme
def test_the_library_writes_the_same_tensors(name: str, pair: Callable[[str], tuple[Path, Path]]) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in pair(name))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert theirs[key].shape == tensor.shape, key
        assert theirs[key].dtype == tensor.dtype or "_proj." not in key, key
        assert torch.equal(theirs[key].float(), tensor.float()), key


@each_scheme
def test_the_librarys_configuration_says_what_ours_does(name: str, pair: Callable[[str], tuple[Path, Path]]) -> None:
    ours, theirs = (json.loads((folder / "config.json").read_text())["quantization_config"] for folder in pair(name))
    assert within({**ours, "format": OTHER_FORMATS.get(name, ours["format"])}, theirs)


def within(said: Any, whole: Any) -> bool:
    """Whether everything that is said is in the whole."""
    if isinstance(said, dict):
        return all(key in whole and within(value, whole[key]) for key, value in said.items())
    return bool(said == whole)


@pytest.mark.parametrize("name", [name for name in DRAWN if name != IN_BLOCKS])
def test_hugging_face_reads_the_weights_that_a_checkpoint_stands_for(
    name: str, pair: Callable[[str], tuple[Path, Path]]
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder, _ = pair(name)
    whole = CompressedTensorsConfig(run_compressed=False)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=whole)
    right = network(SCHEMES[name]).state_dict()
    found = {key: tensor for key, tensor in read.state_dict().items() if key in right}
    assert found.keys() == right.keys()
    in_bfloat16 = "NVFP4" in name  # as the library decompresses it: scale and product are rounded
    for key, tensor in found.items():
        torch.testing.assert_close(tensor.float(), right[key], rtol=4e-3 if in_bfloat16 else 1e-5, atol=1e-8)


@pytest.mark.engine
def test_an_engine_serves_the_librarys_checkpoints(pair: Callable[[str], tuple[Path, Path]]) -> None:
    sampling = {"max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0}
    asked = {"do": "generate", "prompts": FEW, "sampling": sampling}
    runs = start_features(*((pair(name)[1], [asked], {}) for name in DRAWN)).result()["runs"]
    for name, run in zip(DRAWN, runs, strict=True):
        texts, got = answered(FEW, run["steps"][0])
        right = computed(network(SCHEMES[name]), texts)
        assert distance(got, right.scores) <= right.rounding, name
        assert run["report"]["layers"][SCHEMES[name].layer] == 4 * 4
