"""JSON text as K3's prompts spell it."""

import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Compact JSON, keys sorted at every level, characters unescaped (schemas and tool lists)."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def spaced_json(value: Any) -> str:
    """JSON with a space after commas and colons, keys in given order (argument values)."""
    return json.dumps(value, ensure_ascii=False)
