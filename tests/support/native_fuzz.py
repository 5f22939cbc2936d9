"""Random calls of every native entry, under the sanitizers of addresses and of undefined behaviour.

``python native_fuzz.py SECONDS SEED NOTE`` compiles the C++ of this project with them, calls it with right arguments
and with arguments that are wrong in one or more places, and prints a report as JSON. The file ``NOTE`` holds the
current call, in case the process dies. The sanitizer's library must be preloaded: :func:`run` does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.cpp"))
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
RANKS = 3
"""Largest number of changes of one call."""


def run(seconds: float, seed: str, cache: Path) -> dict[str, Any]:
    """Run this module in a process and return its report.

    Args:
        cache: a folder for compiled files.
    """
    names = ("libasan.so", "libstdc++.so")  # the second, or an exception ends the process
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    with tempfile.NamedTemporaryFile() as note:
        done = subprocess.run(
            [sys.executable, __file__, str(seconds), seed, note.name],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + 500,
            env={
                **os.environ,
                "LD_PRELOAD": " ".join(found),
                "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_odr_violation=0",
                "XDG_CACHE_HOME": str(cache),
                "OMP_NUM_THREADS": "2",
            },
        )
        assert done.returncode == 0, f"{note.read().decode().strip()}\n{done.stderr[:6000]}"
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@dataclass
class Entry:
    """A native entry: a function, and right calls of it."""

    name: str
    function: Callable[..., object]
    draw: Callable[[random.Random], tuple[list[Any], dict[str, Any]]]
    declines: tuple[type[Exception], ...]
    alone: bool
    done: Counter[str] = field(default_factory=Counter)


def entries() -> list[Entry]:
    """Return the registry's implementations that run this project's C++, and the kernels of vLLM's V2 runner."""
    from fl_dispatch import get_default_manager
    from fl_dispatch.errors import NotSupported
    from fl_dispatch.evidence.verify import implementations
    from vllm_fl.runner_kernels import native

    found = []
    for impl in implementations(get_default_manager(), None, ["vendor.cpu.cpp"]):
        # Of PyTorch's operations, with errors of their own.
        composed = "vendor" not in impl.fn.__module__ or impl.op_name == "linear"
        allowed = (Exception,) if composed else (NotSupported, IndexError)
        draw = _samples(impl.op_name, len(signature(impl.fn).parameters))
        found.append(Entry(impl.op_name, impl.fn, draw, allowed, impl.op_name == "kv_cache_write"))
    declined = (_Declined, IndexError)
    for form in native.NATIVE:
        draw, names = RUNNER[form.__name__]
        found.append(Entry(form.__name__, _answering(native.NATIVE[form], names.split()), draw, declined, True))
    return found


class _Declined(Exception):
    """Raised when the function declines arguments, which the form then handles."""


def _answering(function: Callable[[Any], bool], names: list[str]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        if not function(SimpleNamespace(**dict(zip(names, args, strict=True)), **kwargs)):
            raise _Declined

    return run


def _samples(op: str, parameters: int) -> Callable[[random.Random], tuple[list[Any], dict[str, Any]]]:
    import torch

    from fl_dispatch.ops import OPERATORS

    kept: dict[Any, list[Any]] = {}

    def draw(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
        dtype = chance.choice((torch.float32, torch.bfloat16))
        if dtype not in kept:
            made = OPERATORS[op].samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(chance.randrange(9)))
            small = [sample.args for sample in made if sum(_size(arg) for arg in sample.args) < 400_000]
            kept[dtype] = [args[:parameters] for args in small if not any(arg is not None for arg in args[parameters:])]
        return [_copied(arg) for arg in chance.choice(kept[dtype])], {}

    return draw


def _size(arg: Any) -> int:
    import torch

    return arg.untyped_storage().nbytes() if isinstance(arg, torch.Tensor) else 0


def _copied(arg: Any) -> Any:
    """Copy to separate memory of the exact size, so that the sanitizer sees a byte too many; gaps are kept."""
    import torch

    if not isinstance(arg, torch.Tensor) or not arg.numel():
        return arg
    last = sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
    memory = torch.empty(last + 1, dtype=arg.dtype)
    return memory.as_strided(arg.shape, arg.stride()).copy_(arg)


# -- calls of the runner's kernels ------------------------------------------------------------------------------------


def _integers(chance: random.Random, low: int, high: int, *shape: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    dtype = chance.choice((torch.int32, torch.int64))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(dtype)


def _starts(chance: random.Random, counts: list[int]) -> Any:
    import torch

    return torch.tensor([sum(counts[:index]) for index in range(len(counts) + 1)]).to(
        chance.choice((torch.int32, torch.int64))
    )


def _positions(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    requests, states = chance.randrange(4), 5
    counts = [chance.randrange(4) for _ in range(requests)]
    return [
        _integers(chance, 0, 1, sum(counts) + chance.randrange(3)), _integers(chance, 0, 9, states),
        _integers(chance, 0, states, requests), _starts(chance, counts), _integers(chance, 0, 9, states), states,
    ], {}  # fmt: skip


def _combined(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    requests, states, drafts = chance.randrange(1, 4), 5, chance.randrange(1, 4)
    counts = [1 + chance.randrange(drafts + 1) for _ in range(requests)]
    tokens = sum(counts)
    return [
        _integers(chance, 0, 99, tokens), _integers(chance, 0, states, requests), _integers(chance, 0, 99, states, 1),
        _starts(chance, counts), _integers(chance, 0, 9, requests), _integers(chance, 0, 9, states),
        _integers(chance, 0, 99, states, drafts), _starts(chance, counts), _integers(chance, 0, 9, tokens),
    ], {"NUM_NEW_SAMPLED_TOKENS": 1}  # fmt: skip


def _sampled(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    requests, states = chance.randrange(4), 5
    counts = [chance.randrange(4) for _ in range(requests)]
    return [
        *(_integers(chance, 0, 4, requests) for _ in range(3)), _starts(chance, counts),
        _integers(chance, 0, states, requests), _integers(chance, 0, 9, states),
    ], {}  # fmt: skip


def _updated(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    requests, states, tokens, row, words = chance.randrange(4), 5, chance.randrange(1, 4), 12, 20
    counted = chance.choice((None, _integers(chance, 0, 3, states, words)))
    return [
        _integers(chance, -1, states, requests), _integers(chance, 0, 9, states), _integers(chance, 0, 9, states, 1),
        counted, _integers(chance, 0, words, requests, tokens),
        _integers(chance, 0, tokens + 1, requests), _integers(chance, 0, 2, requests),
        chance.choice((None, _starts(chance, [1] * requests))), _integers(chance, 0, 9, states, row),
        _integers(chance, 0, row - tokens, states),
    ], {}  # fmt: skip


def _block_tables(chance: random.Random, rows: int, widths: list[int]) -> Any:
    import torch

    from vllm_fl.runner_kernels import tables

    kept = [_integers(chance, 0, 9, rows, width).int() for width in widths]
    addresses = torch.tensor([table.data_ptr() for table in kept], dtype=torch.uint64)
    setattr(addresses, tables.TENSORS, tuple(kept))
    return addresses


def _gathered(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    import torch

    requests, states, widths = chance.randrange(4), 5, [chance.randrange(1, 6) for _ in range(chance.randrange(1, 3))]
    groups, rows, masked = len(widths), requests + chance.randrange(3), chance.random() < 0.5
    return [
        _integers(chance, 0, states, requests), _block_tables(chance, states, widths),
        _block_tables(chance, max(1, rows), widths), torch.tensor(widths),
        _integers(chance, 0, min(widths) + 1, groups, states), requests, _integers(chance, 0, 90, states),
        _integers(chance, 0, 40, groups), _integers(chance, 1, 33, groups),
    ], {"MASK_SLIDING_WINDOW": masked}  # fmt: skip


def _slots(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    import torch

    requests, states, widths = chance.randrange(4), 5, [chance.randrange(1, 6) for _ in range(chance.randrange(1, 3))]
    counts, groups = [chance.randrange(4) for _ in range(requests)], len(widths)
    tokens = sum(counts) + chance.randrange(3)
    most = tokens + chance.randrange(3)
    return [
        most, _integers(chance, -1, states, requests), _starts(chance, counts),
        _integers(chance, 0, 16 * min(widths), tokens), _block_tables(chance, states, widths),
        torch.tensor(widths), _integers(chance, 16, 17, groups),
        torch.rand(groups) < 0.8, _integers(chance, 0, 9, groups, most), most,
    ], {"CP_SIZE": 1, "PAD_ID": -1}  # fmt: skip


def _greedy(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    import torch

    rows, states, size, block = chance.randrange(4), 5, chance.randrange(1, 90), chance.choice((16, 40))
    blocks = -(-size // block)
    return [
        _integers(chance, 0, 9, rows, blocks), torch.rand(rows, blocks), None, torch.rand(rows, size),
        _integers(chance, -1, states, rows), torch.zeros(states), torch.zeros(states),
        torch.zeros(states), size,
    ], {"BLOCK_SIZE": block}  # fmt: skip


RUNNER = {
    "prepare_pos_seq_lens": (_positions, "pos seq_lens idx_mapping query_start_loc num_computed_tokens max_num_reqs"),
    "combine_sampled_and_draft_tokens": (
        _combined,
        (
            "input_ids idx_mapping last_sampled_tokens query_start_loc seq_lens prefill_len draft_tokens cu_num_logits"
            " logits_indices"
        ),
    ),
    "get_num_sampled_and_rejected": (
        _sampled,
        "num_sampled num_rejected seq_lens cu_num_logits idx_mapping prefill_len",
    ),
    "post_update": (
        _updated,
        (
            "idx_mapping num_computed_tokens last_sampled_tokens output_bin_counts sampled_tokens num_sampled"
            " num_rejected query_start_loc all_token_ids total_len"
        ),
    ),
    "gather_block_tables": (
        _gathered,
        (
            "batch_idx_to_req_idx src_block_table_ptrs dst_block_table_ptrs block_table_strides num_blocks num_reqs"
            " num_computed_tokens sliding_window_reach block_sizes"
        ),
    ),
    "compute_slot_mappings": (
        _slots,
        (
            "max_num_tokens idx_mapping query_start_loc pos block_table_ptrs block_table_strides block_sizes"
            " slot_mapping_enabled slot_mappings slot_mappings_stride"
        ),
    ),
    "gumbel_sample": (
        _greedy,
        "local_argmax local_max logits_cache logits expanded_idx_mapping seeds pos temp vocab_size",
    ),
}
"""Form in place of which a function runs → right calls of it, and the names of their arguments."""


# -- wrong calls ------------------------------------------------------------------------------------------------------


def _changes(chance: random.Random, tensor: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield changes of a tensor, by name."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(begin: int) -> Any:
        with FakeTensorMode():
            whole = torch.empty(
                (*tensor.shape[:-1], tensor.shape[-1] + begin) if tensor.dim() else (), dtype=tensor.dtype
            )
            return whole[..., begin:] if tensor.dim() else whole

    def freed() -> Any:
        copy = _copied(tensor).clone()
        copy.untyped_storage().resize_(0)
        return copy

    def outside() -> Any:
        copy = tensor.clone()
        if copy.numel() and not copy.is_floating_point():
            most = torch.iinfo(copy.dtype)
            values = (most.min, most.max, -1, -7, 1 << 20, 97, 3)
            copy.view(-1)[chance.randrange(copy.numel())] = chance.choice(
                [v for v in values if most.min <= v <= most.max]
            )
        return copy

    def sliced() -> Any:
        if not tensor.dim():
            return tensor
        dim = chance.randrange(tensor.dim())
        return tensor.narrow(dim, 0, chance.randrange(tensor.shape[dim] + 1))

    def longer() -> Any:
        if not tensor.dim():
            return tensor
        return torch.cat([tensor] * 2, chance.randrange(tensor.dim()))

    def gaps() -> Any:
        if not tensor.dim():
            return tensor
        dim = chance.randrange(tensor.dim())
        return tensor.repeat_interleave(2, dim).narrow(dim, 1, 2 * tensor.shape[dim] - 1)[
            (slice(None),) * dim + (slice(None, None, 2),)
        ]

    yield "fake", lambda: fake(0)
    yield "a view of a fake one", lambda: fake(3)
    yield "meta", lambda: tensor.to("meta")
    yield "freed", freed
    yield "an index outside", outside
    yield "sliced", sliced
    yield "longer", longer
    yield "with gaps", gaps
    yield "transposed", lambda: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    yield "shape transposed", lambda: tensor.mT if tensor.dim() > 1 else tensor
    yield "a dimension more", lambda: tensor[None]
    yield "a dimension less", lambda: tensor.flatten(0, 1) if tensor.dim() > 1 else tensor.sum()
    yield "expanded", lambda: tensor[:1].expand(tensor.shape) if tensor.dim() else tensor
    yield (
        "another dtype",
        lambda: tensor.to(
            chance.choice(
                (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8, torch.float64)
            )
        ),
    )
    yield "empty", lambda: tensor.new_empty((0, *tensor.shape[1:]))
    yield "sparse", tensor.to_sparse


ATTRIBUTES = ("fl_tensors",)


def _is_freed(tensor: Any) -> bool:
    return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def _wrong(chance: random.Random, args: list[Any], alone: bool) -> str:
    """Change some arguments in place and describe that; ``alone``: unchecked code of PyTorch reads none of them."""
    import torch

    said = []
    for _ in range(chance.randrange(1, RANKS + 1)):
        place = chance.randrange(len(args))
        arg = args[place]
        if isinstance(arg, torch.Tensor) and arg.layout is torch.strided and arg.is_cpu and type(arg) is torch.Tensor:
            kept = {name: getattr(arg, name) for name in ATTRIBUTES if hasattr(arg, name)}
            of_tables = bool(kept) and chance.random() < 0.5
            target = kept["fl_tensors"][0] if of_tables else arg
            if type(target) is not torch.Tensor or target.layout is not torch.strided or _is_freed(target):
                continue
            name, change = chance.choice(list(_changes(chance, target)))
            if name == "freed" and not alone:
                continue
            try:
                changed = change()
            except (RuntimeError, TypeError, ValueError):  # PyTorch has it not for this type
                continue
            if of_tables:
                arg.fl_tensors = (changed, *arg.fl_tensors[1:])
            else:
                args[place] = changed
                for attribute, value in kept.items():
                    setattr(changed, attribute, value)
            said.append(f"{place}: {name}")
        elif isinstance(arg, bool):
            args[place] = not arg
        elif isinstance(arg, int) and chance.random() < 0.5:
            args[place] = chance.choice((arg + 1, arg - 1, 0, -1, 2 * arg + 1))
            said.append(f"{place}: {args[place]}")
    return ", ".join(said)


def _words(arg: Any) -> str:
    import torch

    if isinstance(arg, torch.Tensor):
        return f"{type(arg).__name__}({arg.dtype}, {tuple(arg.shape)}, {arg.layout}, {arg.device})"
    return repr(arg)


def main(seconds: float, seed: str, note: str) -> dict[str, Any]:
    import warnings

    import torch

    from fl_dispatch import cpp
    from fl_dispatch.backends.vendor.cpu.impl import plain

    warnings.simplefilter("ignore")
    cpp.FLAGS = (*cpp.FLAGS, *SANITIZED)
    called: Counter[str] = Counter()
    load = cpp.load

    class Recorded:
        """A library with counted calls."""

        def __init__(self, source: Path) -> None:
            self.source, self.library = source, load(source)

        def __getattr__(self, name: str) -> Any:
            function = getattr(self.library, name)

            class Function:
                def __setattr__(self, attribute: str, value: Any) -> None:
                    setattr(function, attribute, value)

                def __call__(_, *args: Any) -> Any:  # noqa: N805
                    called[f"{self.source.name}:{name}"] += 1
                    return function(*args)

            return Function()

    cpp.load = Recorded  # type: ignore[assignment]
    exported = set()
    folder = Path(os.environ["XDG_CACHE_HOME"], "fl-dispatch/cpp")
    for source in SOURCES:
        library = str(folder / Path(load(source)._name).name)
        symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
        names = [line.split()[2] for line in symbols.stdout.splitlines() if line.split()[1] == "T"]
        exported |= {f"{source.name}:{name}" for name in names if not name.startswith("_")}
    chance, wrong, everything = random.Random(seed), [], entries()
    deadline = time.monotonic() + seconds
    with open(note, "r+b") as file, torch.inference_mode():
        turn = 0
        least, most = (count * len(everything) for count in (12, 60))  # of a slow machine, and where all are declined
        while (
            time.monotonic() < deadline
            or turn < least
            or (turn < most and not all(entry.done["done"] for entry in everything))
        ):
            entry = everything[turn % len(everything)]
            turn += 1
            args, kwargs = entry.draw(chance)
            said = "" if chance.random() < 0.2 else _wrong(chance, args, entry.alone)
            file.seek(0)
            text = f"{entry.name}, changed {said or 'nothing'}: {', '.join(map(_words, args))} {kwargs}"
            file.write(text.encode().ljust(4000)[:4000])
            file.flush()
            try:
                entry.function(*args, **kwargs)
                entry.done["done"] += 1
            except entry.declines as error:
                entry.done[type(error).__name__.strip("_")] += 1
                if not said:
                    entry.done["declined unchanged"] += 1
            except Exception as error:
                if "sparse" in said:  # to look at their layout would cost each call more than it is worth
                    continue
                wrong.append(f"{text}: {type(error).__name__}: {error}")
    if plain.why_unavailable():  # the processor has no kernel for these products
        exported -= {"plain.cpp:install", "plain.cpp:counted"}
    elif not plain.counted():
        wrong.append("linear: the C++ computed no product")
    return {
        "exported": sorted(exported), "called": sorted(called), "wrong": wrong[:20], "calls": turn,
        "entries": {entry.name: entry.done for entry in everything},
    }  # fmt: skip


if __name__ == "__main__":
    sys.path[0] = ""
    _, given_seconds, given_seed, given_note = sys.argv
    print(json.dumps(main(float(given_seconds), given_seed, given_note)))
