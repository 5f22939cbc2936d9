"""Operator dispatch for serving large language models on any chip.

An operator has several implementations. A policy says which may run, and in which order. A call runs the first one that
fits and falls back to the next if that is safe. See docs/guide/architecture.md.
"""

from __future__ import annotations

from .compiled.manifest import Manifest
from .discovery import (
    PLUGIN_GROUP,
    PLUGIN_MODULES_ENV,
    clear_discovered_plugins,
    discover_plugins,
    get_discovered_plugins,
)
from .errors import (
    BrokenPromiseError,
    ConfigError,
    DispatchError,
    DispatchFrozenError,
    NoImplementationError,
    NotSupported,
    PluginLoadError,
    RankDivergenceError,
    RegistrationError,
)
from .logger_manager import get_logger, set_log_level
from .manager import (
    OpManager,
    bind_op,
    call_op,
    explain,
    freeze_dispatch,
    get_default_manager,
    reset_default_manager,
    resolve_op,
    thaw_dispatch,
)
from .policy import (
    PREFER_DEFAULT,
    PREFER_REFERENCE,
    PREFER_VENDOR,
    VALID_PREFER_VALUES,
    PolicyManager,
    SelectionPolicy,
    get_policy,
    get_policy_epoch,
    policy_context,
    policy_from_config,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from .registry import OpRegistry, OpRegistrySnapshot
from .selection.decision import Decision
from .types import BackendImplKind, BackendPriority, OpImpl, Traits, match_token
from .version import __version__
from .weight_forms import weights_were_written

__all__ = [
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "VALID_PREFER_VALUES",
    "BackendImplKind",
    "BackendPriority",
    "BrokenPromiseError",
    "ConfigError",
    "Decision",
    "DispatchError",
    "DispatchFrozenError",
    "Manifest",
    "NoImplementationError",
    "NotSupported",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OpRegistrySnapshot",
    "PluginLoadError",
    "PolicyManager",
    "RankDivergenceError",
    "RegistrationError",
    "SelectionPolicy",
    "Traits",
    "__version__",
    "bind_op",
    "call_op",
    "clear_discovered_plugins",
    "discover_plugins",
    "explain",
    "freeze_dispatch",
    "get_default_manager",
    "get_discovered_plugins",
    "get_logger",
    "get_policy",
    "get_policy_epoch",
    "match_token",
    "policy_context",
    "policy_from_config",
    "reset_default_manager",
    "reset_global_policy",
    "resolve_op",
    "set_global_policy",
    "set_log_level",
    "thaw_dispatch",
    "weights_were_written",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
