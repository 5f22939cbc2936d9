"""``torch.cuda``'s streams, events and graphs, which vLLM's model runners use for any device.

The names are ``Stream``, ``Event``, ``default_stream``, ``current_stream``, ``stream`` and ``set_stream``; for a device
with graphs also ``CUDAGraph``, ``graph`` and ``graph_pool_handle``.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from fl_dispatch.devices import DeviceSpec


def lend_names(device: DeviceSpec) -> None:
    """Give ``torch.cuda`` the streams, events and graphs of a device with its own PyTorch module. Idempotent.

    A class is used unchanged, because vLLM's annotations name it. A function gets a wrapper, because Dynamo rejects one
    function under two names.
    """
    if device.is_foreign:
        for name, found in device.stream_names().items():
            setattr(torch.cuda, name, _event(found) if name == "Event" else _shell(found))


def _shell(found: Any) -> Any:
    return found if isinstance(found, type) else partial(found)


def _event(event: Any) -> Any:
    """Return the device's event class, called without the optional ``blocking`` unless its signature has it."""
    try:
        if "blocking" in inspect.signature(event).parameters:
            return event
    except ValueError:  # a class in C may have no signature
        pass
    return _WithoutBlocking("Event", (), {"events": event})


class _WithoutBlocking(type):
    """A class in place of an event class, because annotations and ``isinstance`` need a class.

    Calls ignore ``blocking``.
    """

    events: Any

    def __call__(cls, *args: Any, blocking: bool = False, **options: Any) -> Any:
        return cls.events(*args, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.events)
