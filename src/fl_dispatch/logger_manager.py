"""Our loggers and their level.

A library does not configure logging, and where the program did, nothing here adds to it. If it did not, Python shows
WARNINGs and drops the rest; vLLM is such a place, since it configures its own logger ``vllm`` only. So when a level
below WARNING is asked for (the default, INFO, holds while settings are read), our top loggers get one handler that
writes to stderr and falls silent as soon as another handler would show the same record.
"""

from __future__ import annotations

import difflib
import logging
import sys

from .errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEFAULT_LEVEL = "INFO"
FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"

_loggers: dict[str, logging.Logger] = {}
_level: int | None = None  # asked for all loggers, those of the future included


class _StderrHandler(logging.Handler):
    """Writes to whatever stderr is now, unless another handler gets the record, too."""

    def emit(self, record: logging.LogRecord) -> None:
        if _has_other_handler(logging.getLogger(record.name)):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)  # as every handler does: a log line must not stop a program


_handler = _StderrHandler()
_handler.setFormatter(logging.Formatter(FORMAT))


def get_logger(name: str = "fl_dispatch") -> logging.Logger:
    """The logger with this name; the same object as :func:`logging.getLogger` gives."""
    logger = _loggers.get(name)
    if logger is None:
        logger = _loggers.setdefault(name, logging.getLogger(name))
        if _level is not None and _is_top(name):
            _apply(logger, _level)
    return logger


def set_log_level(level: str | int, name: str | None = None) -> None:
    """Set the level of one of our loggers, or of all.

    Setting all sets the topmost ones and lets the others follow them. A name that is not one of our loggers is ignored.

    Args:
        level: one of :data:`LEVELS` in any case, or its number.
        name: the logger; ``None`` for all.

    Raises:
        ConfigError: there is no such level.
    """
    global _level
    number = _level_number(level)
    if name is not None:
        if name in _loggers:
            _apply(_loggers[name], number)
        return
    _level = number
    for known, logger in list(_loggers.items()):
        if _is_top(known):
            _apply(logger, number)
        else:
            logger.setLevel(logging.NOTSET)


def begin_logging() -> None:
    """Have records shown from now on at the default level, unless a level was asked for: before settings are read."""
    if _level is None:
        set_log_level(DEFAULT_LEVEL)


def _level_number(level: str | int) -> int:
    if isinstance(level, str) and level.upper() in LEVELS:
        return int(getattr(logging, level.upper()))
    if isinstance(level, int) and not isinstance(level, bool) and level > logging.NOTSET:
        return level
    close = difflib.get_close_matches(str(level).upper(), LEVELS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError("log level", None, f"Invalid log level {level!r}; {hint}valid: {', '.join(LEVELS)}")


def _apply(logger: logging.Logger, level: int) -> None:
    logger.setLevel(level)
    if level < logging.WARNING and not logger.hasHandlers():
        logging.getLogger(logger.name.partition(".")[0]).addHandler(_handler)  # one a tree, so one line a record


def _is_top(name: str) -> bool:
    """Whether no logger above this one is ours."""
    parts = name.split(".")
    return not any(".".join(parts[:length]) in _loggers for length in range(1, len(parts)))


def _has_other_handler(logger: logging.Logger) -> bool:
    current: logging.Logger | None = logger
    while current is not None:
        if any(handler is not _handler for handler in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


get_logger()
