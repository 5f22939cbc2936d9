"""``torch.cuda``'s streams, events and graphs, by which vLLM's model runners call those of any device.

The names are ``Stream``, ``Event``, ``default_stream``, ``current_stream``, ``stream`` and ``set_stream``; those of a
device with graphs are also ``CUDAGraph``, ``graph`` and ``graph_pool_handle``.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from fl_dispatch.devices import DeviceSpec


def lend_names(device: DeviceSpec) -> None:
    """Give ``torch.cuda`` the streams, events and graphs of a device with a PyTorch module of its own. Idempotent.

    A class stays itself, because vLLM's annotations name it. A function gets a shell of its own, because Dynamo refuses
    to know one function under two names.
    """
    if device.is_foreign:
        for name, found in device.stream_names().items():
            setattr(torch.cuda, name, _event(found) if name == "Event" else _shell(found))


def _shell(found: Any) -> Any:
    return found if isinstance(found, type) else partial(found)


def _event(event: Any) -> Any:
    """The device's class of events, called without ``blocking``, a wish only, unless its signature has it."""
    try:
        if "blocking" in inspect.signature(event).parameters:
            return event
    except ValueError:  # a class in C may not say
        pass
    return _WithoutBlocking("Event", (), {"events": event})


class _WithoutBlocking(type):
    """A class in place of a class of events: annotations and ``isinstance`` take no function. Calls ignore
    ``blocking``.
    """

    events: Any

    def __call__(cls, *args: Any, blocking: bool = False, **options: Any) -> Any:
        return cls.events(*args, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.events)
