"""The log as JSON, one object a line. Imports nothing heavy: it is set up before models are loaded."""

from __future__ import annotations

import json
import logging


class JsonLines(logging.Formatter):
    """One JSON object a line of the log; of a request all that is said of it."""

    def format(self, record: logging.LogRecord) -> str:
        body = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname.lower(), "logger": record.name}
        body |= getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)
