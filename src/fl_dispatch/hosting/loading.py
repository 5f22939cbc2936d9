"""The account of a checkpoint's tensors while a host loads them: which parameters they filled, and which nothing took.

Hosts drop tensors whose names they do not know, leave parameters whose tensors do not come, and cast whatever a layer's
loader is handed. So :class:`Account` follows the data itself: a dispatch mode sees each operator of ATen that runs
while weights load, and knows by the storages which tensor of the file each value comes from. Loaders may then rename,
slice, transpose, dequantize or join tensors as they like, whichever way they write.

The other ways see less. ``_version`` of a parameter does not count writes through ``.data``, which is how both hosts
write, and has no parts. A sentinel that is written before and searched afterwards touches all memory twice, any
pattern of 8-bit weights may be real, and it says nothing about tensors that were dropped. Calls of ``weight_loader``
miss loaders that write themselves, and say nothing about the parts of a joined parameter.

The cost is some Python for each operator, which does not grow with a tensor's size.
"""

from __future__ import annotations

import math
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from ..logger_manager import get_logger
from ..settings import get_settings
from . import checkpoint_files
from .checkpoint_files import EMBEDDING, HEAD
from .filled import Place
from .quantized.remedies import OUT_OF_ORDER

logger = get_logger(__name__)
Named = Iterable[tuple[str, Tensor]]


class CheckpointError(ValueError):
    """A checkpoint and the model that a host made for it do not fit."""


class Allowed(NamedTuple):
    """Tensors or parameters that may be left over.

    Args:
        pattern: of a whole name.
        reason: why the answers are right without it.
        equal: a pattern of the tensor whose values it must have, ``"zeros"``, or ``"order"`` for values that ascend;
            empty where any values may be left.
    """

    pattern: str
    reason: str
    equal: str = ""


ZEROS, ORDER = "zeros", "order"
COLUMNS = ".g_idx"
"""The end of the name of a tensor of ``gptq`` that says in which group each column is."""
UNTAKEN = (
    Allowed(r".*\brotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)", "hosts compute rotations from config.json"),
    Allowed(r".*\b(attn|attention|self_attention)\.(bias|masked_bias)", "a causal mask that old versions saved"),
    Allowed(r".*\.bias", "GPTQ's tools write biases of zeros for layers without one", ZEROS),
    Allowed(rf".*{re.escape(COLUMNS)}", "groups of GPTQ's columns in their order, which is what kernels take", ORDER),
    Allowed(HEAD, "a tied head is the embedding", EMBEDDING),
    Allowed(r"(.*\.)?(mtp|mtp_\w+|nextn)\..*", "layers that predict further tokens serve drafts alone"),
    Allowed(
        r"(.*\.)?(visual|vision|vision_\w+|vpm|resampler|connector|mlp1|\w*projector|embed_vision|image_newline)(\..*)?",
        "a model that reads text alone has no encoder of pictures",
    ),
    Allowed(
        r"(.*\.)?(audio_\w+|embed_audio|apm|time_series|talker|token2wav|code2wav|tts)(\..*)?",
        "a model that answers with text has no encoder, or no voice, of sounds",
    ),
)
"""Tensors that no host has to take."""
CACHE_SCALES = (
    Allowed(r".*\.((k|v|kv)_scale|[kv]_proj\.output_scale)", "the cache is not quantized, so it has no use for scales"),
)
"""Further ones, of a model without parameters for them."""


# -- where data comes from --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """The tensors of a checkpoint that values were made of; ``dtype``: of the only one, if they are its numbers."""

    names: frozenset[str]
    dtype: torch.dtype | None = None


_NOTHING = _Origin(frozenset())


class _Storage:
    """The origins of one storage's bytes: of ranges, such as tensors that lie in one buffer, or of all of them."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # As long as it lives, no other storage has this one's address.
        self.kept = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.ranges: dict[tuple[int, int], frozenset[str]] = {}
        self.whole = _NOTHING

    def origin(self, tensor: Tensor) -> _Origin:
        """The origin of a view; a tensor of the file may be read as numbers of another type of the same bytes."""
        if self.ranges:
            first = tensor.storage_offset() * tensor.element_size()
            for (start, end), names in self.ranges.items():
                if start <= first < end:
                    return _Origin(names, tensor.dtype)
        return self.whole


# -- one operator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """An operator: positions and names of the arguments that it overwrites, and whether it makes views or casts."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    views: bool
    casts: bool


_CASTS = {"aten::_to_copy", "aten::clone", "aten::copy_", "aten::lift_fresh", "aten::_copy_from"}
"""Operators whose result has the values of their one argument."""


@cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    views = not written and any(result.alias_info is not None for result in schema.returns)
    positions, names = tuple(index for index, _ in written), tuple(name for _, name in written)
    return _Kind(positions, names, views, schema.name in _CASTS)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The account's eyes in one thread."""

    def __init__(self, account: Account) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.account = account

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks whether to wrap the method below, which would import its compiler and cost 7 µs a call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.views:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self.account._ran(func, kind, args, kwargs, result)
        return result


# -- the account ------------------------------------------------------------------------------------------------------


class Cast(NamedTuple):
    """A tensor whose values became another kind of numbers in a parameter."""

    name: str
    stored: torch.dtype
    parameter: str
    dtype: torch.dtype


class Unfilled(NamedTuple):
    """A parameter or buffer that the checkpoint does not fill; ``names``: the tensors that filled a part."""

    name: str
    names: list[str]


class Account:
    """The account of one load.

    Args:
        model: as its constructor left it.
        source: the checkpoint's folder, or its name in a hub.
    """

    def __init__(self, model: nn.Module, source: str) -> None:
        self.source = source
        self.files: list[str] = []
        self._file_of: dict[str, str] = {}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.taken: set[str] = set()
        self.dropped: set[str] = set()
        """Names that the host's class of the model declares unused."""
        self.casts: list[Cast] = []
        self.last: str | None = None
        self._storages: dict[int, _Storage] = {}
        self._places: dict[int, list[Place]] = {}
        self._kept: list[StorageWeakRef] = []
        self._scalar = _NOTHING
        self._lock = threading.RLock()
        for name, tensor in _named(model):
            self._kept.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
            self._places.setdefault(_key(tensor), []).append(Place(name, tensor))

    def see(self, weights: Named) -> Iterator[tuple[str, Tensor]]:
        """Hand on a checkpoint's tensors, as they come, with their names."""
        for name, tensor in _unwatched(weights):
            with self._lock:
                self.last, self._scalar = name, _NOTHING
                self.tensors[name] = tensor.dtype, tuple(tensor.shape)
                self._note(name, tensor)
            yield name, tensor
        self.last = None

    def _note(self, name: str, tensor: Tensor) -> None:
        key = _key(tensor)
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(tensor.untyped_storage())
        start = int(tensor.storage_offset()) * tensor.element_size()
        span = start, start + max(tensor.numel(), 1) * tensor.element_size()
        for other in [other for other in storage.ranges if other != span and other[0] < span[1] and span[0] < other[1]]:
            del storage.ranges[other]  # a reader has filled its buffer again
        storage.ranges[span] = storage.ranges.get(span, frozenset()) | {name}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what this thread runs, and at what threads run that it asks meanwhile."""
        with _pools_are_watched(), _Watch(self):
            yield

    def _ran(self, func: Any, kind: _Kind, args: Any, kwargs: Any, result: Any) -> None:
        with self._lock:
            written = [args[index] for index in kind.positions if index < len(args)]
            written += [kwargs[name] for name in kind.names if name in kwargs]
            origin = self._origin(kind, args, kwargs)
            if not kind.positions and not origin.names:
                return
            self.taken |= origin.names
            if isinstance(result, int | float | bool):
                self._scalar = origin
            elif not written:
                for tensor in _tensors(result if isinstance(result, list | tuple) else (result,)):
                    self._make(tensor, origin)
            for tensor in _tensors(written):
                self._write(tensor, origin)

    def _origin(self, kind: _Kind, args: Any, kwargs: Any) -> _Origin:
        found = [
            origin
            for tensor in _tensors((*args, *kwargs.values()))
            if (storage := self._storages.get(_key(tensor))) is not None
            and (origin := storage.origin(tensor)).names
            and _key(tensor) not in self._places
        ]
        if not found:
            return _NOTHING
        if len(found) == 1:
            return found[0] if kind.casts else _Origin(found[0].names)
        return _Origin(frozenset[str]().union(*(origin.names for origin in found)))

    def _make(self, tensor: Tensor, origin: _Origin) -> None:
        key = _key(tensor)
        if key not in self._places:
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage(tensor.untyped_storage())
            storage.whole = origin

    def _write(self, tensor: Tensor, origin: _Origin) -> None:
        key = _key(tensor)
        places = self._places.get(key)
        if places is None:
            if origin.names:
                storage = self._storages.get(key)
                whole = _NOTHING if storage is None else storage.whole
                self._make(tensor, _Origin(whole.names | origin.names))
            return
        if not origin.names and tensor.numel() == 1:
            origin, self._scalar = self._scalar, _NOTHING
        for place in places:
            place.write(tensor, origin.names)
            if origin.dtype is not None and _number(origin.dtype) != _number(tensor.dtype):
                self.casts.append(Cast(min(origin.names), origin.dtype, place.name, tensor.dtype))

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def unfilled(self, model: nn.Module, allowed: Sequence[Allowed]) -> list[Unfilled]:
        """The model's parameters that no tensor filled, and those, and buffers, that tensors filled in part.

        A buffer that no tensor fills has its constructor's value, such as a factor that config.json says.
        """
        found = []
        for name, tensor in _named(model):
            if not tensor.numel() or tensor.is_meta:
                continue
            excused = not isinstance(tensor, nn.Parameter) or bool(_matching(name, allowed))
            key = _key(tensor)
            places = [place for place in self._places.get(key, ()) if place.offset == tensor.storage_offset()]
            if places:
                names = set[str]().union(*(place.names for place in places))
                if (not names and excused) or self._is_joined_scale(name, names):
                    continue
                if not any(place.names and place.is_whole() for place in places):
                    found.append(Unfilled(name, sorted(names)))
                continue
            storage = self._storages.get(key)
            origin = _NOTHING if storage is None else storage.origin(tensor)
            self.taken |= origin.names  # the parameter is the file's tensor itself, or what was made of it
            if not origin.names and not excused:
                found.append(Unfilled(name, []))
        return found

    def _is_joined_scale(self, name: str, names: set[str]) -> bool:
        """Whether a checkpoint has one number for layers that it joined itself, which a host's loader writes once."""
        return len(names) == 1 and all(
            name.split(".")[-2:] == other.split(".")[-2:] and math.prod(self.tensors[other][1]) == 1 for other in names
        )

    def left(self, allowed: Sequence[Allowed]) -> list[str]:
        """The tensors that nothing took and that may not be left over."""
        if not any(place.name.endswith(".k_scale") for places in self._places.values() for place in places):
            allowed = (*allowed, *CACHE_SCALES)
        found = [name for name in self.tensors if name not in self.taken and name not in self.dropped]
        return [name for name in found if not any(self._holds(name, rule) for rule in _matching(name, allowed))]

    def _holds(self, name: str, rule: Allowed) -> bool:
        """Whether a tensor that may be left has the values that it must have, if a file of safetensors has it."""
        if not rule.equal or not (file := self.file_of(name)):
            return True
        values = checkpoint_files.read(file, name)
        if rule.equal == ORDER:
            return bool((values.diff() >= 0).all())
        if rule.equal == ZEROS:
            return not values.any()
        others = (other for other in self.tensors if re.fullmatch(rule.equal, other))
        return any(torch.equal(values, checkpoint_files.read(self.file_of(other), other)) for other in others)

    def file_of(self, name: str) -> str:
        """The file of safetensors that has a tensor; an empty string where none says so."""
        if not self._file_of:
            self._file_of = checkpoint_files.files_by_name(self.files)
        return self._file_of.get(name, "")

    # -- refusals -----------------------------------------------------------------------------------------------------

    def refuse_unfilled(self, model: nn.Module, allowed: Sequence[Allowed]) -> None:
        """Raise :class:`CheckpointError` for casts between kinds of numbers, and for parameters that are not filled."""
        for cast in self.casts:
            if re.fullmatch(r".*\bweight_shape", cast.name):
                continue  # its numbers say how many the packed ones are, and hosts do not read them
            raise CheckpointError(
                f"{self._named(cast.name)} has numbers of {_words(cast.stored)}, and the model would read them as "
                f"{_words(cast.dtype)} (parameter '{cast.parameter}'): {CONFIGURED}"
            )
        if not (found := self.unfilled(model, allowed)):
            return
        (name, names), *more = found
        layer, _, parameter = name.rpartition(".")
        others = f" (and so of {_count(more, 'parameter')}, such as '{more[-1].name}')" if more else ""
        if names:
            said = f"only a part of '{parameter}' of the layer '{layer}' is in {self.source}, by {_list(names)}{others}"
        else:
            said = f"{self.source} has no tensor for '{parameter}' of the layer '{layer}'{others}"
        left, above = self.left(()), layer.rpartition(".")[0] + "."
        if name in left:
            raise CheckpointError(
                f"the host's class of this model drops {self._named(name)}, so '{parameter}' of the layer '{layer}' "
                f"would be whatever lies in memory{others}: this host cannot serve the checkpoint"
            )
        beside = [other for other in left if other.startswith(above)] if above != "." else []
        if beside:
            exact = [other for other in beside if other.startswith(f"{layer}.")] or beside
            raise CheckpointError(
                f"{said}; it has {self._named(exact[0])}, which the model has no place for: {CONFIGURED}"
            )
        raise CheckpointError(f"{said}: the files are not complete, or not of the model that config.json describes")

    def refuse_left(self, left: Sequence[str]) -> None:
        """Raise :class:`CheckpointError` if there are tensors that no rank took, and that no setting excuses."""
        excused = get_settings().unused_tensors
        if named := [name for name in left if any(fnmatchcase(name, pattern) for pattern in excused)]:
            logger.warning(
                "%d tensors of %s are left unused, such as '%s', because %s names them",
                len(named), self.source, named[0], UNUSED,
            )  # fmt: skip
            left = [name for name in left if name not in set(named)]
        if moved := [name for name in left if name.endswith(COLUMNS)]:
            raise CheckpointError(f"{self._named(moved[0])} {OUT_OF_ORDER}")
        if left:
            more = f" (nor of {_count(left[1:], 'tensor')}, such as '{left[-1]}')" if len(left) > 1 else ""
            raise CheckpointError(
                f"nothing in the model made use of {self._named(left[0])}{more}: the answers would be those of another "
                f"network; {CONFIGURED}, or name it in {UNUSED} if the answers are right without it"
            )

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of a host's loader, which say what it met, then say of which tensor and file too."""
        try:
            yield
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if self.last is None or isinstance(error, torch.OutOfMemoryError) or _is_ours(error):
                raise
            shape = "×".join(map(str, self.tensors[self.last][1]))
            raise CheckpointError(
                f"{self._named(self.last)} ({_words(self.tensors[self.last][0])}, {shape}) cannot be loaded "
                f"({type(error).__name__}: {str(error) or 'without a message'}): {CONFIGURED}"
            ) from error

    def _named(self, name: str) -> str:
        file = self.file_of(name)
        return f"'{name}' of {file or self.source}"


UNUSED = "VLLM_FL_UNUSED_TENSORS"
"""The variable of the setting that excuses tensors."""
CONFIGURED = (
    "compare config.json with the files, and its quantization_config, if there is one, with this layer (targets, "
    "ignore, dynamic, modules_to_not_convert)"
)
"""Advice to users where a checkpoint's configuration and files disagree."""


def _is_ours(error: BaseException) -> bool:
    """Whether a plugin of this project raised an error, which is a sentence then."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("fl_dispatch", "vllm_fl", "sglang_fl")


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(rest: Sequence[object], noun: str) -> str:
    return f"{len(rest)} more {noun}{'s' if len(rest) > 1 else ''}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def ignored(config: Any) -> tuple[Allowed, ...]:
    """Tensors that Transformers' class of a model ignores when a checkpoint has them.

    Args:
        config: the model's configuration.
    """
    import transformers

    patterns: list[str] = []
    for name in getattr(config, "architectures", None) or ():
        try:
            patterns += getattr(getattr(transformers, name), "_keys_to_ignore_on_load_unexpected", None) or []
        except (AttributeError, ImportError, RuntimeError) as error:  # it has no such class, or cannot import it here
            logger.debug("Transformers has no class %s here: %s", name, error)
    return tuple(Allowed(rf".*(?:{pattern}).*", "Transformers' class of the model ignores it") for pattern in patterns)


def predictors(config: Any) -> tuple[Allowed, ...]:
    """The layers behind a model's last one that predict further tokens, as DeepSeek-V3's checkpoints have them.

    Args:
        config: the configuration of the model's text.
    """
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    numbers = "|".join(str(config.num_hidden_layers + index) for index in range(further))
    reason = "layers that predict further tokens serve drafts alone"
    return (Allowed(rf"(.*\.)?layers\.({numbers})\..*", reason),) if further else ()


_submit = ThreadPoolExecutor.submit
_watching = 0
_pools = threading.Lock()


@contextmanager
def _pools_are_watched() -> Iterator[None]:
    """Have pools look at what a thread with an account gives them: a dispatch mode is a thread's own.

    SGLang's DeepSeek has threads of such a pool write its weights. Loads may overlap.
    """
    global _watching
    with _pools:
        _watching += 1
        ThreadPoolExecutor.submit = _watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _pools:
            _watching -= 1
            if not _watching:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


def _watched(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, _Watch):
        return _submit(pool, call, *args, **kwargs)  # it reads files

    @wraps(call)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with _Watch(mode.account):
            return call(*args, **kwargs)

    return _submit(pool, inside, *args, **kwargs)


def _unwatched(weights: Named) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an iterator, which reads files meanwhile: a dozen operators that no account is of."""
    source, mode = iter(weights), _get_current_dispatch_mode()
    while True:
        with _pop_mode_temporarily() if isinstance(mode, _Watch) else nullcontext():
            found = next(source, None)
        if found is None:
            return
        yield found
        mode = _get_current_dispatch_mode()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that a checkpoint of the model would have."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _matching(name: str, allowed: Sequence[Allowed]) -> list[Allowed]:
    return [rule for rule in allowed if re.fullmatch(rule.pattern, name)]


def _number(dtype: torch.dtype) -> str:
    """The kind of numbers of a type; a cast within a kind changes at most how exact they are."""
    if dtype.itemsize == 1:
        # float8_e8m0fnu has powers of two only, which every wider type has as well.
        return "floating point" if dtype is torch.float8_e8m0fnu else str(dtype)
    return "floating point" if dtype.is_floating_point else "integer" if not dtype.is_complex else "complex"
