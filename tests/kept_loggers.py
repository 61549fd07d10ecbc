"""Puts the loggers back that a command has set up in the process of its test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.cli.terminal import console_log


@contextmanager
def kept_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in console_log.PROJECT_LOGGERS]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
