"""The table of settings: the variables, the YAML key and the check of each.

A value takes three steps: a variable's text is split into plain data (YAML already is plain data), pydantic checks the
type, and the item's ``check`` turns the data into the field's value. So the same value is valid or invalid wherever it
was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fl_dispatch.logger_manager import LEVELS

from . import names, values
from .document import read_json
from .place import Place, shorten
from .selection_policy import PREFERENCES
from .values import Plain


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Args:
        name: its name; the prefix ``VLLM_FL_`` stands for the host's prefixes.
        split: turns its text into plain data.
        ours: whether the variable is this package's, not the host's.
        file: whether its text is the path of a file that is read.
    """

    name: str
    split: Callable[[str, Place], Plain]
    ours: bool = True
    file: bool = False

    def place(self, name: str, text: str) -> Place:
        """Return the place of a value that is set under this name to this text."""
        return Place(f"environment variable {name}" + (f" ({shorten(text)})" if self.file else ""))


@dataclass(frozen=True)
class Item:
    """One setting.

    Args:
        field: the value's name in :class:`Settings` or in its policy.
        variables: first one set wins.
        yaml_key: its key in a YAML file, or ``None``.
        type: the type of its plain data.
        check: turns plain data of that type into the field's value, or raises ``ConfigError``.
        doc: its effect in one line.
    """

    field: str
    variables: tuple[Variable, ...]
    yaml_key: str | None
    type: Any
    check: Callable[[Any, Place], Any]
    doc: str

    def read(self, plain: Plain, place: Place) -> Any:
        """Return the field's value.

        Raises:
            ConfigError: the plain data has the wrong type or a wrong value.
        """
        return self.check(values.typed(self.type, plain, place), place)


def _item(
    field: str,
    variables: str,
    split: Callable[[str, Place], Plain],
    kind: Any,
    check: Callable[[Any, Place], Any],
    doc: str,
    *,
    yaml: str | None = None,
) -> Item:
    return Item(field, tuple(Variable(name, split) for name in variables.split()), yaml, kind, check, doc)


def _flag(field: str, variable: str, doc: str, *, yaml: str | None = None) -> Item:
    return _item(field, variable, values.boolean, bool, values.as_is, doc, yaml=yaml)


def _name_list(
    field: str, variable: str, check: Callable[[str, Place], None], doc: str, *, yaml: str | None = None
) -> Item:
    return _item(field, variable, values.comma_list, list[str], partial(values.name_set, check), doc, yaml=yaml)


ITEMS: tuple[Item, ...] = (
    _flag("enabled", "VLLM_FL_PREFER_ENABLED", "whether anything is dispatched at all"),
    _item(
        "config_path", "VLLM_FL_CONFIG", values.text, str, values.path,
        "the user's YAML file: every item with a YAML key comes from it or from the default",
    ),
    _item("platform", "VLLM_FL_PLATFORM", values.text, str, values.platform, "the platform that gives the defaults"),
    _item(
        "prefer", "VLLM_FL_PREFER", values.text, str, partial(values.choice, "prefer", PREFERENCES),
        "the kind of implementation that is tried first; it orders, it never excludes", yaml="prefer",
    ),
    _flag("strict", "VLLM_FL_STRICT", "an implementation's error is raised, and nothing else is tried", yaml="strict"),
    Item(
        "per_op_order",
        (Variable("VLLM_FL_PER_OP", values.per_op), Variable("VLLM_FL_OP_CONFIG", read_json, file=True)),
        "op_backends", dict[str, list[str]], values.op_orders,
        "the only implementations that are tried for an operator, in order",
    ),
    Item(
        "op_tuned", (), "op_tuned", dict[str, list[values.Rule]], values.op_rules,
        "an operator's order for calls with a dtype, a number of tokens or a phase",
    ),
    _name_list(
        "allow_vendors", "VLLM_FL_ALLOW_VENDORS", names.check_vendor,
        "the only vendors that may run; [] allows none", yaml="allow_vendors",
    ),
    _name_list(
        "deny_vendors", "VLLM_FL_DENY_VENDORS", names.check_vendor,
        "vendors that never run; beats allow_vendors", yaml="deny_vendors",
    ),
    _flag("use_flaggems", "USE_FLAGGEMS", "whether FlagGems is used, for operators and for ATen"),
    _name_list(
        "flagos_whitelist", "VLLM_FL_FLAGOS_WHITELIST", names.check_flagos_operator,
        "the only operators that FlagGems runs; any blacklist is ignored",
    ),
    _name_list(
        "flagos_blacklist", "VLLM_FL_FLAGOS_BLACKLIST", names.check_flagos_operator,
        "operators that FlagGems does not run", yaml="flagos_blacklist",
    ),
    _flag(
        "aten_replacement", "VLLM_FL_ATEN_REPLACEMENT",
        "whether FlagGems replaces PyTorch's own operators in workers; unset, the device decides",
        yaml="aten_replacement",
    ),
    _name_list(
        "aten_blacklist", "VLLM_FL_ATEN_BLACKLIST", names.check_aten_overload,
        "PyTorch's own operators that no backend replaces, each with its overload (cumsum.out), or * for all",
        yaml="aten_blacklist",
    ),
    _flag(
        "chip_features", "VLLM_FL_CHIP_FEATURES",
        "whether our kernels for a single kind of chip run; if off, the portable ones do",
        yaml="chip_features",
    ),
    _flag("oot_enabled", "VLLM_FL_OOT_ENABLED", "whether layers are registered with the host"),
    _name_list(
        "oot_whitelist", "VLLM_FL_OOT_WHITELIST", names.check_layer,
        "the only operators or layer classes that are registered; any blacklist is ignored",
    ),
    _name_list(
        "oot_blacklist", "VLLM_FL_OOT_BLACKLIST", names.check_layer,
        "operators or layer classes that are not registered", yaml="oot_blacklist",
    ),
    _flag("native_platform", "VLLM_FL_NATIVE_PLATFORM", "whether the host keeps its own platform for this device"),
    _flag(
        "fuse_rope_kvcache", "VLLM_FL_FUSE_ROPE_KVCACHE",
        "whether compiled graphs rotate queries and keys and write the cache by one fused operator",
    ),
    _flag(
        "fuse_one_token", "VLLM_FL_FUSE_ONE_TOKEN",
        "whether graphs of one token fuse products with the norm before and the gate after them",
    ),
    _flag(
        "seal_tactics", "VLLM_FL_SEAL_TACTICS",
        "whether kernels stop choosing by timing once the start is over",
    ),
    _flag(
        "mxfp4_as_fp8", "VLLM_FL_MXFP4_AS_FP8",
        "whether MXFP4 weights become fp8 with a scale for each block of 128, if that changes no number",
    ),
    _item(
        "page_out", "VLLM_FL_PAGE_OUT", values.text, str, values.path,
        "the folder on a disk to which a CPU's plain weights move if products use packed copies",
    ),
    _item(
        "steps", "VLLM_FL_STEPS", values.whole, int, partial(values.within, 1, 64),
        "the largest number of decode steps per scheduler call, while all requests decode",
    ),
    _item(
        "steps_ms", "VLLM_FL_STEPS_MS", values.number, float, partial(values.within, 0.0, 1e4),
        "milliseconds that the steps of one scheduler call may take",
    ),
    _item(
        "unused_tensors", "VLLM_FL_UNUSED_TENSORS", values.comma_list, list[str], values.patterns,
        "tensors of a checkpoint that the model may leave unused, as patterns such as *.extra_head.*",
        yaml="unused_tensors",
    ),
    Item(
        "log_level",
        (Variable("VLLM_FL_LOG_LEVEL", values.text), Variable("VLLM_LOGGING_LEVEL", values.host_level, ours=False)),
        None, str, partial(values.choice, "log level", LEVELS), "how much this project logs",
    ),
    _flag("dispatch_debug", "VLLM_FL_DISPATCH_DEBUG", "every decision is logged with its reasons; calls are counted"),
    _item(
        "plugin_modules", "VLLM_FL_PLUGIN_MODULES", values.comma_list, list[str], values.modules,
        "modules with a register_builtins(registry), or module:function; one that does not load is an error",
    ),
    _item(
        "flagcx_path", "FLAGCX_PATH", values.text, str, values.path,
        "the FlagCX library, or a directory that holds it: communication between processes runs through it, "
        "or the start ends with one error",
    ),
    _item(
        "oplist_path", "FLAGGEMS_ENABLE_OPLIST_PATH", values.text, str, values.path,
        "the file that lists the operators that FlagGems runs, one a rank",
    ),
    Item(
        "batch_invariant", (Variable("VLLM_BATCH_INVARIANT", values.boolean, ours=False),), None, bool, values.as_is,
        "only implementations that declare batch_invariant may run; the host's own variable",
    ),
    _item(
        "shadow_share", "VLLM_FL_SHADOW_SHARE", values.number, float, partial(values.within, 0.0, 1.0),
        "the share of live calls that also run through a second implementation, to compare the results; 0 for none",
        yaml="shadow_share",
    ),
    _name_list(
        "shadow_operators", "VLLM_FL_SHADOW_OPERATORS", names.check_operator,
        "the only operators to compare", yaml="shadow_operators",
    ),
    _item(
        "shadow_second", "VLLM_FL_SHADOW_SECOND", values.text, str, values.token,
        "the implementation to compare calls with, as a token", yaml="shadow_second",
    ),
    _item(
        "shadow_action", "VLLM_FL_SHADOW_ACTION", values.text, str,
        partial(values.choice, "shadow action", values.SHADOW_ACTIONS),
        "whether a wrong implementation is only logged (log), or also taken out of service where that is safe (ban)",
        yaml="shadow_action",
    ),
    _item(
        "shadow_budget", "VLLM_FL_SHADOW_BUDGET", values.number, float, partial(values.within, 0.0, 1.0),
        "the maximum cost of comparing, as a share of a process's time", yaml="shadow_budget",
    ),
    _item(
        "damaged_requests", "VLLM_FL_DAMAGED_REQUESTS", values.text, str,
        partial(values.choice, "treatment of damaged requests", values.DAMAGE_ACTIONS),
        "how requests with NaN or infinity, or with keys and values of a wrong implementation, are handled",
        yaml="damaged_requests",
    ),
)  # fmt: skip
"""Every setting. The environment, YAML files, errors and ``docs/guide/settings.md`` follow this table."""


def variable_names() -> tuple[str, ...]:
    """Return this package's environment variables."""
    return tuple(variable.name for item in ITEMS for variable in item.variables if variable.ours)
