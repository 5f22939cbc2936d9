"""Prompts for real engines, and the tokens that they should generate, for any host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPTS = [[(7 * row + column) % 400 + 5 for column in range(length)] for row, length in enumerate((7, 27, 331, 1))]
MAX_TOKENS = 16


def reference_network(model: Path, dtype: Any, host: str = "vllm") -> Any:
    """Return Hugging Face's network of a checkpoint, set up to compute the same as the host's engine."""
    import torch
    from transformers import AutoModelForCausalLM

    # "eager" is the arithmetic as the model defines it; PyTorch's attention would leave a soft cap out.
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()
    for module in network.modules():
        if type(module).__name__ == "BloomMLP":  # vLLM's Bloom has GELU itself, Hugging Face's its tanh form
            module.gelu_impl = torch.nn.GELU()
        if type(module).__name__.endswith("Indexer"):
            module.forward = _lower_first(module.forward)
    one_more = {("cohere2", "vllm"), ("cohere2", "sglang"), ("gemma3n_text", "sglang")}
    if (network.config.model_type, host) in one_more:  # the host's window also counts the token itself
        network.config.sliding_window += 1
    if (network.config.model_type, host) == ("gemma3n_text", "vllm"):  # its class adds no embeddings to each layer
        network.model.get_per_layer_inputs = lambda *_: None
    return network


def _lower_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make an indexer's ``forward`` list the lower position of equal scores first, as ``index_topk`` does.

    ``Tensor.topk`` may take any of them, and tokens that no head of the indexer attends to have a score of 0.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Ordered(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.Tensor.topk:
                return func(*args, **(kwargs or {}))
            scores, k = args
            values, places = scores.sort(dim=-1, descending=True, stable=True)
            return torch.return_types.topk((values[..., :k], places[..., :k]))

    def ordered(*args: Any, **given: Any) -> Any:
        with Ordered():
            return forward(*args, **given)

    return ordered


def expected_tokens(
    model: Path, prompts: Sequence[list[int]] = PROMPTS, max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    """Return the tokens that Hugging Face transformers generates greedily for prompts; no choice may be close."""
    import torch

    network = reference_network(model, torch.float32)
    tokens = []
    for prompt in prompts:
        output = network.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        for scores in output.scores:
            best, second = scores[0].topk(2).values.tolist()
            assert best - second > 1e-3, "the checkpoint's choices are too close to compare"
    return tokens


def ran(result: Mapping[str, Any], operator: str) -> set[str]:
    """Return the implementations of an operator that the engine's process called."""
    pairs = (key.split(" ") for key in result["report"]["counts"])
    return {impl_id for name, impl_id in pairs if name == operator}
