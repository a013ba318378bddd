"""Structured logs: one JSON object a line, one line a request, without what users ask or get. Free of jax.

{"time": "2025-01-31T12:00:00.123Z", "level": "info", "event": "request", "request_id": "...", "status": 200, ...}
"""

import json
import logging
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import HTTPConnection

_SCOPE_KEY = "specinfer.log"
_FIELDS = "fields"
"""Name under which a record carries its own fields."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, event and the record's own fields; a traceback if there is one."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"), "level": record.levelname.lower(),
            "event": record.getMessage().strip(),
        } | getattr(record, _FIELDS, {})  # fmt: skip
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str = "info") -> None:
    """Send the server's and uvicorn's records to stderr, as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("specinfer_jax", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    # Its news about itself is told by our own events.
    logging.getLogger("uvicorn.error").setLevel("WARNING")


def log(logger: logging.Logger, event: str, **fields: object) -> None:
    """Write an event with its fields."""
    logger.info(event, extra={_FIELDS: fields})


def begin(scope: MutableMapping[str, Any], **fields: object) -> dict[str, object]:
    """The log line of a request, to be filled while it runs."""
    scope[_SCOPE_KEY] = fields
    return fields


def fields_of(connection: HTTPConnection) -> dict[str, object]:
    """The log line of a request."""
    return connection.scope.setdefault(_SCOPE_KEY, {})
