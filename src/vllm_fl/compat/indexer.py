"""vLLM's indexer of sparse latent attention, which a model constructs directly, without a registry."""

from __future__ import annotations

import importlib

from torch import nn

MODELS = "vllm.model_executor.models.deepseek_v2"
"""The module of models with an indexer that vLLM lets a platform replace."""


def replace_indexer(indexer: type[nn.Module], cache: type[nn.Module]) -> None:
    """Make new models use these classes in place of vLLM's indexer and its cache."""
    models = importlib.import_module(MODELS)
    vars(models).update(Indexer=indexer, DeepseekV32IndexerCache=cache)


def split_graphs_at(operator: str) -> None:
    """Split piecewise graphs at the plugin's operator, as vLLM splits them at its own indexer."""
    from vllm.config import CompilationConfig

    if operator not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(operator)
