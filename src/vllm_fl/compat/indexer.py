"""vLLM's indexer of sparse latent attention, which a model makes itself: no registry of vLLM's replaces it."""

from __future__ import annotations

import importlib

from torch import nn

MODELS = "vllm.model_executor.models.deepseek_v2"
"""The module of the models with an indexer that vLLM gives a platform of others."""


def replace_indexer(indexer: type[nn.Module], cache: type[nn.Module]) -> None:
    """Have models that are made from now on make these in the place of vLLM's indexer and its cache."""
    models = importlib.import_module(MODELS)
    vars(models).update(Indexer=indexer, DeepseekV32IndexerCache=cache)


def split_graphs_at(operator: str) -> None:
    """Have piecewise graphs end before the plugin's operator, as they do before vLLM's indexer, and begin behind it."""
    from vllm.config import CompilationConfig

    if operator not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(operator)
