"""Launches of forms: a form names the kernel's arguments that it reads, and gets only these.

vLLM launches a form as it launches the kernel, with the same arguments (see ``vllm.triton_utils.dispatcher``). A name
is the kernel's parameter without ``_ptr``, so parameters that another version adds or moves do not affect forms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Form = Callable[..., Any]


def names_of(kernel: Any) -> list[str]:
    """Return the names of a kernel's parameters, in order."""
    given = getattr(kernel, "arg_names", None) or inspect.signature(getattr(kernel, "func", kernel)).parameters
    return [name.removesuffix("_ptr") for name in given]


def named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def launched(form: Form, names: Sequence[str]) -> Form:
    """Wrap a form so that it takes its kernel's arguments.

    Args:
        names: names of the kernel's parameters.

    Raises:
        TypeError: the form needs an argument that the kernel lacks.
    """
    asked = inspect.signature(form).parameters.values()
    everything = any(each.kind is each.VAR_KEYWORD for each in asked)
    wanted = [each.name for each in asked if each.kind is not each.VAR_KEYWORD]
    lacking = [each.name for each in asked if each.default is each.empty and each.name in {*wanted} - {*names}]
    if lacking:
        raise TypeError(f"{form.__name__}: the kernel of this vLLM has no {', '.join(lacking)}")

    def launch(*args: Any, **kwargs: Any) -> Any:
        given = named(names, args, kwargs)
        return form(**(given if everything else {name: given[name] for name in wanted if name in given}))

    return launch
