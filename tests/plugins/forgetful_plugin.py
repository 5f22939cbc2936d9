"""Right implementations of the operators with a state, but for the state: it stays as it was."""

import torch

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.ops import OPERATORS

NAMES = sorted(name for name, operator in OPERATORS.items() if "states" in operator.parameters)


def forgetful(name):
    operator, reference = OPERATORS[name], getattr(ReferenceBackend(), name)
    place = list(operator.parameters).index("states")

    def run(*args):
        return reference(*args[:place], torch.clone(args[place]), *args[place + 1 :])

    run.__signature__ = operator.signature
    return run


def register_builtins(registry):
    registry.register_many(
        OpImpl(name, "vendor.forgetful", BackendImplKind.VENDOR, forgetful(name), vendor="forgetful") for name in NAMES
    )
