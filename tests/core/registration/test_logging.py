"""The rules of our loggers."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_dispatch import logger_manager
from fl_dispatch.errors import ConfigError
from fl_dispatch.logger_manager import get_logger, set_log_level
from fl_dispatch.settings import Settings, install_settings

SOURCES = Path(logger_manager.__file__).parents[1]


@pytest.fixture(autouse=True)
def own_loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loggers of the test's own; levels and handlers of the package's are put back."""
    package = logging.getLogger("fl_dispatch")
    before = package.level, list(package.handlers)
    monkeypatch.setattr(logger_manager, "_loggers", {"fl_dispatch": package})
    monkeypatch.setattr(logger_manager, "_level", None)
    yield
    package.setLevel(before[0])
    package.handlers[:] = before[1]
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("fl_test") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)
            logger.handlers.clear()


def script(code: str) -> str:
    """The text that a plain script writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PYTHONPATH": str(SOURCES)},
    )
    assert not done.stdout
    return done.stderr


def test_a_logger_is_loggings_own_and_always_the_same() -> None:
    assert get_logger() is get_logger("fl_dispatch") is logging.getLogger("fl_dispatch")
    assert get_logger("fl_test.a") is get_logger("fl_test.a") is logging.getLogger("fl_test.a")
    assert "fl_test.a" in logger_manager._loggers


def test_one_logger_gets_a_level() -> None:
    one, other = get_logger("fl_test.one"), get_logger("fl_test.other")
    set_log_level("ERROR", "fl_test.one")
    assert (one.level, other.level) == (logging.ERROR, logging.NOTSET)


def test_all_loggers_get_a_level() -> None:
    one, other = get_logger("fl_test.one"), get_logger("fl_test.other")
    set_log_level("error")
    assert {logger.getEffectiveLevel() for logger in (one, other, get_logger())} == {logging.ERROR}


def test_setting_all_reaches_one_that_was_set_before_and_one_that_comes_later() -> None:
    child = get_logger("fl_dispatch.test_part")
    set_log_level("DEBUG", "fl_dispatch.test_part")
    set_log_level("ERROR")
    assert child.getEffectiveLevel() == logging.ERROR
    assert get_logger("fl_test.later").getEffectiveLevel() == logging.ERROR


def test_a_users_level_on_the_package_reaches_its_modules() -> None:
    child = get_logger("fl_dispatch.test_part")
    set_log_level("INFO")
    logging.getLogger("fl_dispatch").setLevel(logging.DEBUG)
    assert child.isEnabledFor(logging.DEBUG)


def test_an_unknown_logger_is_ignored() -> None:
    set_log_level("DEBUG", "fl_test.nobody_asked_for")
    assert "fl_test.nobody_asked_for" not in logging.Logger.manager.loggerDict


def test_a_level_may_be_a_number() -> None:
    set_log_level(logging.ERROR, get_logger("fl_test.a").name)
    assert get_logger("fl_test.a").level == logging.ERROR


@pytest.mark.parametrize("level", ["DEBG", "", "7", 0, -1, True])
def test_a_bad_level_is_refused(level: str | int) -> None:
    with pytest.raises(ConfigError, match="Invalid log level .*valid: DEBUG, INFO, WARNING, ERROR, CRITICAL"):
        set_log_level(level)


def test_a_bad_level_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean DEBUG"):
        set_log_level("debg")


def test_the_settings_level_is_applied() -> None:
    install_settings(Settings(log_level="ERROR"))
    assert get_logger().level == logging.ERROR


def test_no_handler_where_somebody_configured_logging() -> None:
    set_log_level("DEBUG")  # pytest's handlers are on the root
    assert get_logger().handlers == []


def test_a_plain_script_shows_what_was_asked_for_once() -> None:
    text = script(
        """
from fl_dispatch.logger_manager import get_logger, set_log_level
set_log_level("INFO")
logger = get_logger("fl_dispatch.part")
logger.info("seen %s", 1)
logger.debug("hidden")
get_logger("vllm_fl.part").info("seen %s", 2)
get_logger("vllm_fl").info("seen %s", 3)
set_log_level("INFO")
get_logger("vllm_fl.part").info("seen %s", 4)
"""
    )
    assert [line.rpartition("] ")[2] for line in text.splitlines()] == ["seen 1", "seen 2", "seen 3", "seen 4"]
    assert text.startswith("INFO ")
    assert "[fl_dispatch.part]" in text


def test_a_plain_script_shows_warnings_without_any_handler_of_ours() -> None:
    text = script(
        """
import logging
from fl_dispatch.logger_manager import get_logger, set_log_level
set_log_level("WARNING")
get_logger().warning("seen")
assert not logging.getLogger("fl_dispatch").handlers
"""
    )
    assert text == "seen\n"


def test_our_handler_is_silent_once_somebody_configures_logging() -> None:
    text = script(
        """
import logging, sys
from fl_dispatch.logger_manager import get_logger, set_log_level
set_log_level("INFO")
logging.basicConfig(format="theirs %(message)s", level=logging.INFO)
get_logger("fl_dispatch.part").info("once")
"""
    )
    assert text == "theirs once\n"


def test_the_variable_decides_when_settings_are_read() -> None:
    text = script(
        """
import os
import re
os.environ["VLLM_FL_LOG_LEVEL"] = "ERROR"
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings
get_settings()
get_logger("fl_dispatch.part").warning("hidden")
get_logger("fl_dispatch.part").error("seen")
"""
    )
    assert text.rpartition("] ")[2] == "seen\n"


def test_a_warning_about_settings_has_level_date_and_logger() -> None:
    text = script(
        """
import os
os.environ["VLLM_FL_WIBBLE"] = "1"
from fl_dispatch.settings import get_settings
get_settings()
get_settings()
"""
    )
    assert re.fullmatch(r"WARNING 20\S+ \S+ \[fl_dispatch\.settings\.load\] .*VLLM_FL_WIBBLE.*\n", text)
