"""Weights of a call: plain, in place, or declared, so that an implementation may prepare them.

Plain weights are between guards, like all other arguments. Declared ones cannot be: PyTorch marks a whole memory, so a
weight in part of one is not prepared. A declared weight has separate memory, compared as a whole after each call. It
stays from call to call, like a model's: its form is made once and reused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from .. import weight_forms
from .arguments import Arguments, apart, copied
from .inputs import Input

PLAIN, PREPARED = "plain", "prepared"


class Weights:
    """One input's arguments for one implementation.

    Args:
        given: the input.
        declared: whether its weights are declared, not plain.
    """

    def __init__(self, given: Input, declared: bool) -> None:
        self.declared = declared
        self.before = given.args
        self._own: dict[int, Tensor] = {}
        if declared:
            places = {id(weight) for weight in given.operator.stay(given.args)}
            self._own = {at: apart(value) for at, value in enumerate(given.args) if id(value) in places}
            self.before = self._with(given.args, {at: apart(weight) for at, weight in self._own.items()})
            weight_forms.declare_all(self._own.values())

    def arguments(self) -> Arguments:
        """Return arguments of another call: the declared weights themselves, and copies of all else."""
        others = self._with(self.before, dict.fromkeys(self._own))
        return self._with(copied(others), self._own)

    def write(self, given: Input, compiled: bool) -> None:
        """Write another input's values into the declared weights, as a loader does.

        Args:
            given: an input with the same shapes.
            compiled: whether compiled code runs next; forms are then rebuilt first, as a host does between steps.
        """
        for at, weight in self._own.items():
            weight.data.copy_(given.args[at])
            if compiled:
                weight_forms.follow(weight, weight_forms.declare(weight))
        self.before = self._with(given.args, {at: apart(weight) for at, weight in self._own.items()})

    @property
    def prepared(self) -> bool:
        """Whether an implementation made a form of any of them."""
        return are_prepared(self._own.values())

    @property
    def asked(self) -> bool:
        """Whether an implementation asked for a form of any of them."""
        forms = map(weight_forms.declare, self._own.values())
        return any(found.made or found.given_up or found.shared for found in forms)

    @property
    def refused(self) -> list[str]:
        """Return for each weight with a requested form why the form could not be kept."""
        return [why for weight in self._own.values() if (why := weight_forms.declare(weight).given_up)]

    @staticmethod
    def _with(args: Arguments, others: Mapping[int, Tensor | None]) -> Arguments:
        return tuple(others.get(at, value) for at, value in enumerate(args))


def are_prepared(weights: Iterable[Tensor]) -> bool:
    """Whether an implementation made a form of any of these declared weights."""
    return any(form is not None for weight in weights for form in weight_forms.declare(weight).made.values())


@contextmanager
def refusals_counted() -> Iterator[None]:
    """Keep unprepared weights out of the log in this block, because the findings count them (``refused``)."""

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO

    weight_forms.logger.addFilter(passes)
    try:
        yield
    finally:
        weight_forms.logger.removeFilter(passes)
