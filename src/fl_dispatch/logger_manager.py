"""Our loggers and their level.

A library does not configure logging, and this module adds nothing if the program did. If the program did not, Python
shows WARNINGs and drops the rest. That is the case in vLLM, which configures its ``vllm`` logger only. So if a level
below WARNING is set (the default is INFO), our top loggers get one handler that writes to stderr. It is silent as soon
as another handler would show the same record.
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
_level: int | None = None  # the level of all loggers, including future ones


class _StderrHandler(logging.Handler):
    """Handler that writes to the current stderr, unless another handler gets the record, too."""

    def emit(self, record: logging.LogRecord) -> None:
        if _has_other_handler(logging.getLogger(record.name)):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)  # every handler of Python does that: a log line must not stop a program


_handler = _StderrHandler()
_handler.setFormatter(logging.Formatter(FORMAT))


def get_logger(name: str = "fl_dispatch") -> logging.Logger:
    """Return the logger with this name, the same object as from :func:`logging.getLogger`."""
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
    """Show records at the default level before settings are read, unless a level was set."""
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
        logging.getLogger(logger.name.partition(".")[0]).addHandler(_handler)  # one a tree: a record shows once


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
