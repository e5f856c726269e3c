"""Log lines for programs: one JSON object a line, with the fields of what it tells; no content of requests."""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

from agent_runtime.gateway.job import Job
from agent_runtime.gateway.operations.meter import Meter

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``; then the record's own ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields: dict[str, Any] = getattr(record, "fields", {})
        line.update((key, value) for key, value in fields.items() if key not in line)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=repr)


def configure(form: Literal["text", "json"], level: str) -> None:
    """Set up the process's log, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


def completion_fields(id_: str, job: Job, meter: Meter) -> dict[str, Any]:
    """What a log line says of a completion that is over. Times in milliseconds."""
    usages = [end.usage for end in meter.ends.values()]
    return {
        "id": id_,
        "session": job.session.engine_name if job.session is not None else "",
        "prompt_tokens": job.replayed.prompt_tokens,
        "images": len(job.replayed.images),
        "cached_tokens": max((usage.cached_tokens for usage in usages), default=0),
        "output_tokens": sum(usage.completion_tokens for usage in usages),
        "replay": job.replayed.replay.header(),
        "first_ms": round(meter.first_ms, 1),
        "total_ms": round(meter.total_ms, 1),
        "outcome": meter.outcome,
        "status": meter.status,
    }
