"""The dequantized network of a quantized checkpoint, and the effect of rounding on it.

The network is Hugging Face's in float32, with the weights dequantized as :mod:`quantized_checkpoints` wrote them, and
each product's input quantized and dequantized as the scheme says.

If inputs are quantized, a difference in the last place of float32 can move an element by a whole quantization step, and
products carry the change to the next layer. So two right computations differ by an amount that depends on scheme and
model. That amount is measured on the network: each product gets a random error as large as that of summation in
float32, ``sqrt(n) * 2**-24 * sum(|x| * |w|)`` for ``n`` terms (Higham and Mary, "A New Approach to Probabilistic
Rounding Error Analysis", 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

import scoring
from fl_dispatch.cli import small_model
from fl_dispatch.cli.half_precision import LARGEST, MEAN
from fl_dispatch.evidence.perplexity import TOLERANCE, perplexity
from quantized_checkpoints import Scheme, is_product, nearest
from running import MAX_TOKENS, reference_network
from variants import ALPHA, RANK

CHUNK = 64
"""Largest number of tokens of a prompt in a step."""
DRAWS = 8
DEVIATIONS = 5
"""Standard deviations above the mean of the draws that rounding may reach; one distance in a million exceeds them."""
UNIT = 2.0**-24
DIVIDED = ("o_proj", "out_proj", "down_proj", "output_linear", ".w2")
"""Products with an input divided among tensor-parallel ranks; each rank quantizes its own part."""


class _Mixture(nn.Module):
    """Hugging Face's mixture of experts with experts as layers; each expert computes all tokens."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.router, fused = getattr(block, "gate", None) or block.router, block.experts
        self.bias = getattr(block, "expert_bias", None)
        self.shared_experts = getattr(block, "shared_experts", None) or getattr(block, "shared_expert", None)
        self.shared_gate = getattr(block, "shared_expert_gate", None)
        self.experts = nn.ModuleList(_Expert(*parts) for parts in zip(fused.gate_up_proj, fused.down_proj, strict=True))

    def _shared(self, x: Tensor) -> Tensor | float:
        if self.shared_experts is None:
            return 0.0
        gate = 1.0 if self.shared_gate is None else self.shared_gate(x).sigmoid()
        return gate * self.shared_experts(x)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        found = self.router(rows) if self.bias is None else self.router(rows, self.bias)
        # Granite's router returns its choice first, other routers their logits.
        chosen, weights = found[:2] if not found[0].is_floating_point() else (found[2], found[1])
        every = x.new_zeros(len(chosen), len(self.experts)).scatter(1, chosen, weights.to(x.dtype))
        every = every.view(*x.shape[:-1], -1)
        mixed = sum(expert(x) * every[..., index, None] for index, expert in enumerate(self.experts))
        return mixed + self._shared(x)


class _Expert(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        for name, weight in zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight = nn.Parameter(weight.detach().clone())
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def network(
    scheme: Scheme | None,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
    model: Path = small_model.CHECKPOINT,
    absorbed: bool = False,
    new: int = MAX_TOKENS,
) -> Any:
    """Return a model's network with a scheme's quantization, or without one for ``None``.

    With a narrower ``dtype`` than float32 the dequantized weights and inputs are rounded to it. If latent attention is
    ``absorbed`` for prompts too, the input of ``kv_b_proj`` is never quantized; otherwise it is not quantized for the
    last ``new`` tokens of a text.
    """
    made = reference_network(model, dtype)
    for module in [*made.modules()]:
        for name, child in module.named_children():
            if hasattr(child, "experts"):
                setattr(module, name, _Mixture(child))
    if scheme is None:
        return made
    for name, module in _products(made):
        own = scheme.of(name)
        module.weight.data = own.write(module.weight.data.float())[1].to(dtype)
        if own.rows is not None and name.endswith("kv_b_proj"):
            if not absorbed:
                _read_by_prompts(made.get_submodule(name.removesuffix(".kv_b_proj")), own.rows, new)
        elif own.rows is not None:
            parts = ranks if name.endswith(DIVIDED) else 1
            module.register_forward_pre_hook(_quantizes_input(own.rows, parts))
    return made


class _QuantizedCache(DynamicCache):
    """A cache that rounds keys and values; ``rounded``: tensor, layer, and whether it holds values → rounded tensor."""

    def __init__(self, rounded: Callable[[Tensor, int, bool], Tensor], config: Any) -> None:
        super().__init__(config=config)
        self.rounded = rounded

    def update(self, key: Tensor, value: Tensor, layer: int, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return super().update(self.rounded(key, layer, False), self.rounded(value, layer, True), layer, *rest, **named)


def with_fp8_cache(made: Any, scales: Sequence[tuple[float, float]]) -> Any:
    """Make the network attend to keys and values stored in float8_e4m3fn, with a pair of scales for each layer."""

    def rounded(x: Tensor, layer: int, of_values: bool) -> Tensor:
        return _through_fp8(x, scales[layer][of_values])

    return _with_cache(made, rounded)


def _through_fp8(x: Tensor, scale: float) -> Tensor:
    return (nearest(x.float() / scale, torch.float8_e4m3fn).float() * scale).to(x.dtype)


def with_fp8_latents(made: Any, scales: Sequence[float], own: Callable[[int], Sequence[int]] | None) -> Any:
    """Make the network's latent attention read latents stored in float8_e4m3fn, with a scale for each layer.

    Args:
        own: the number of a text's tokens → for each token, the first token of its own step. A step reads the latents
            of its own tokens unrounded. ``None`` if every step reads all latents from the cache.
    """
    if own is None:
        return _with_cache(made, lambda x, layer, of_rotary: _through_fp8(x, scales[layer]))

    def both(x: Tensor, layer: int, of_rotary: bool) -> Tensor:
        return torch.cat((_through_fp8(x, scales[layer]), x), -2)

    def seen(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        place = torch.arange(given[0].shape[1] if given else named["hidden_states"].shape[1])
        first, query, key = torch.tensor(own(len(place)))[:, None], place[:, None], place
        shown = torch.cat((key < first, key >= first), -1) & (key <= query).repeat(1, 2)
        return given, {**named, "attention_mask": torch.zeros(shown.shape).masked_fill(~shown, -torch.inf)}

    for layer in made.model.layers:
        layer.self_attn.register_forward_pre_hook(seen, with_kwargs=True)
    return _with_cache(made, both)


def with_int8_cache(made: Any, largest: int = 127) -> Any:
    """Make the network attend to keys and values stored in int8, with a scale for each token and head."""

    def rounded(x: Tensor, layer: int, of_values: bool) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / largest
        return ((x.float() / scale).round() * scale).to(x.dtype)

    return _with_cache(made, rounded)


def _with_cache(made: Any, rounded: Callable[[Tensor, int, bool], Tensor]) -> Any:
    def hook(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        return given, {**named, "past_key_values": _QuantizedCache(rounded, made.config), "use_cache": True}

    made.register_forward_pre_hook(hook, with_kwargs=True)
    return made


def adapted(made: Any, adapter: Path | None) -> Any:
    """Add a LoRA adapter of :mod:`variants` to the network's products; the adapter reads unquantized inputs."""
    factors = {} if adapter is None else load_file(adapter / "adapter_model.safetensors")
    for name, module in _products(made) if factors else ():
        down, up = (factors[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        _add_adapter(module, up @ down * (ALPHA / RANK))
    return made


def _add_adapter(module: nn.Module, weight: Tensor) -> None:
    given: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]), prepend=True)
    module.register_forward_hook(lambda *called: called[-1] + functional.linear(given.pop(), weight))


def _products(made: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in made.named_modules() if is_product(f"{name}.weight")]


def _quantizes_input(change: Any, parts: int) -> Any:
    def hook(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        changed = torch.cat([change(part.float()) for part in given[0].chunk(parts, -1)], -1)
        return (changed.to(given[0].dtype),)

    return hook


def _read_by_prompts(attention: Any, change: Any, new: int) -> None:
    """Quantize the input of ``kv_b_proj`` for keys and values that are read by steps with several tokens of a request.

    A step with one token, such as those after the prompt, multiplies queries with the weights instead. The same holds
    for steps that check drafts, and for steps that leave a request with more tokens than are listed.
    """
    forward = attention.forward

    def both(past_key_values: Any = None, **given: Any) -> tuple[Tensor, Any]:
        absorbed, rest = forward(**given)
        hook = attention.kv_b_proj.register_forward_pre_hook(_quantizes_input(change, 1))
        split, _ = forward(**given)
        hook.remove()
        prompt = absorbed.shape[1] - new
        if prompt > (topk := getattr(attention.config, "index_topk", prompt)):
            prompt = topk // CHUNK * CHUNK
        prompt = prompt if prompt > 1 else 0
        return torch.cat((split[:, :prompt], absorbed[:, prompt:]), 1), rest

    attention.forward = both


def _adds_rounding(generator: torch.Generator, unit: float) -> Any:
    """Return a hook that adds rounding errors to the products of all rows of a batch except the first."""

    def hook(module: Any, given: tuple[Tensor], result: Tensor) -> Tensor:
        (x,) = given
        size = functional.linear(x[1:].abs(), module.weight.abs()) * (x.shape[-1] ** 0.5 * unit)
        moved = result[1:] + size * torch.randn(size.shape, generator=generator)
        return torch.cat((result[:1], moved))

    return hook


@dataclass(frozen=True)
class Computed:
    """The answers of a network, and the effect of rounding on them.

    Args:
        scores: log-probabilities of every token after the first, of all texts.
        best: the highest log-probability of any token at the same places.
        rounding: upper bound of the root mean square distance caused by rounding.
        largest: the largest distance in a draw.
    """

    scores: Tensor
    best: Tensor
    rounding: float
    largest: float

    def decides(self, prompts: Sequence[Sequence[int]], new: int) -> bool:
        """Whether the engine chose the best token wherever rounding cannot change the choice."""
        chosen = torch.cat([torch.arange(len(prompt) + new - 1) >= len(prompt) - 1 for prompt in prompts])
        behind = (self.best - self.scores)[chosen]  # raises if the engine generated another number of tokens
        return float(behind.max()) <= 2 * self.largest


def computed(made: Any, texts: Sequence[Sequence[int]], unit: float = UNIT) -> Computed:
    """Return the network's answers for texts, each token after the earlier ones; ``unit``: rounding unit of sums."""
    generator = torch.Generator().manual_seed(0)
    for _, module in _products(made):
        module.register_forward_hook(_adds_rounding(generator, unit))
    scores, best = _scores(made, texts, 1 + DRAWS)
    moved = scores[1:] - scores[0]
    sizes = moved.square().mean(1).sqrt()
    rounding = float(sizes.mean() + DEVIATIONS * sizes.std())
    return Computed(scores[0], best, rounding, float(moved.abs().max()))


def scores(made: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return a network's log-probabilities of each text's tokens after the first."""
    return _scores(made, texts, 1)[0][0]


def distance(scores: Tensor, others: Tensor) -> float:
    """Return the root mean square of the differences."""
    return float((scores - others).square().mean().sqrt())


def is_as_near(got: Tensor, exact: Tensor, half: Tensor) -> bool:
    """Whether log-probabilities are about as near to ``exact`` (float32) as Hugging Face's ``half`` in a half type."""
    mean = (got - exact).abs().mean() <= MEAN * (half - exact).abs().mean()
    return bool(mean) and distance(got, exact) <= LARGEST * distance(half, exact)


def _scores(made: Any, texts: Sequence[Sequence[int]], copies: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of each text's tokens after the first, ``[copies, tokens]``, and the highest of any."""
    rows, best = [], []
    for text in texts:
        tokens = torch.tensor(text)
        with torch.inference_mode():
            logits = made(tokens.expand(copies, -1)).logits[:, :-1].float().log_softmax(-1)
        rows.append(logits.gather(-1, tokens[1:].expand(copies, -1)[..., None])[..., 0])
        best.append(logits[0].amax(-1))
    return torch.cat(rows, 1), torch.cat(best)


@dataclass(frozen=True)
class Comparison:
    """The comparison of an engine that has a quantized checkpoint with the dequantized network.

    Args:
        right: the network's answers for the engine's texts.
        error: distance of the engine's log-probabilities from these answers.
        quantization: distance from the answers of the network without quantization.
    """

    right: Computed
    error: float
    quantization: float

    @classmethod
    def of(
        cls,
        texts: Sequence[Sequence[int]],
        got: Tensor,
        scheme: Scheme,
        ranks: int,
        model: Path = small_model.CHECKPOINT,
        unit: float = UNIT,
        absorbed: bool = False,
        new: int = MAX_TOKENS,
    ) -> Comparison:
        """Compare an engine's texts and its log-probabilities of every token after the first of each."""
        right = computed(network(scheme, ranks, model=model, absorbed=absorbed, new=new), texts, unit)
        return cls(right, distance(got, right.scores), distance(got, scores(network(None, model=model), texts)))

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the error, and is smaller than the effect of quantization."""
        return self.error <= self.right.rounding < self.quantization


INPUTS_ROUNDED = {"float32": 2e-3, "float16": 5e-3, "bfloat16": 5e-3}
"""Dtype → the largest relative difference from the perplexity in float32 that rounding explains
if inputs are quantized: rounding can move an element by a whole step."""


def tolerance(scheme: Scheme, dtype: str) -> float:
    """Return the largest relative difference of an engine's perplexity from :func:`right_perplexity`."""
    return (TOLERANCE if scheme.rows is None else INPUTS_ROUNDED)[dtype]


def right_perplexity(made: Any) -> float:
    """Return a network's perplexity on the small model's held-out text."""
    scores = []
    for row in scoring.rows():
        tokens = torch.tensor([row])
        with torch.inference_mode():
            found = made(tokens).logits[0, :-1].log_softmax(-1)
        scores.append(found.gather(-1, tokens[0, 1:, None])[:, 0].tolist())
    return perplexity(scores, 1).value


def answered(prompts: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Any]]) -> tuple[list[list[int]], Tensor]:
    """Return an engine's texts, prompts with its tokens, and its log-probabilities of all tokens after the first."""
    texts, scores = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        (tokens,), (steps,) = answer["tokens"], answer["logprobs"]
        texts.append([*prompt, *tokens])
        given = zip(texts[-1][1:], [*answer["prompt_logprobs"][1:], *steps], strict=True)
        scores += [step[str(token)] for token, step in given]
    return texts, torch.tensor(scores)
