"""SGLang in this process, for tests of single layers. Without SGLang nothing in this folder is collected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from host_engines import Host
from single_quantized import Layers

collect_ignore_glob = [] if find_spec("sglang") else ["*test_*.py"]

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SGLang as in a scheduler process: its plugins loaded, its arguments published. Nothing of it is compiled."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    load_plugins()
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(folder), skip_tokenizer_init=True, device="cpu", load_format="dummy")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "disable", True)
        yield


@pytest.fixture(scope="session")
def host() -> Host:
    from sglang_host import HOST

    return HOST


@pytest.fixture
def layers(scheduler: None, monkeypatch: pytest.MonkeyPatch) -> Layers:
    from single_layers import LayersOfSGLang

    from sglang_fl.quantization import configs

    found = LayersOfSGLang()
    monkeypatch.setattr(configs, "get_server_args", lambda: found)  # they read the cache's type alone
    return found
