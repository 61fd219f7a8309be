"""The log as JSON, one object a line, and held while an answer is shown. Imports nothing heavy: it is set up before models are
loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager


class JsonLines(logging.Formatter):
    """One JSON object per line of the log; for a request, with all its numbers."""

    def format(self, record: logging.LogRecord) -> str:
        body = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname.lower(), "logger": record.name}
        body |= getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)


@contextmanager
def held_log() -> Iterator[None]:
    """Hold what our log says until the end: in the middle of an answer it would tear one of its lines."""
    log, records = logging.getLogger("dflash_mlx"), []
    holder = logging.Handler()
    holder.emit = records.append
    propagates, log.propagate = log.propagate, False
    log.addHandler(holder)
    try:
        yield
    finally:
        log.removeHandler(holder)
        log.propagate = propagates
        for record in records:
            log.handle(record)
