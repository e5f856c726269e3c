"""What every driver asks of its client: a question that needs the tool, and another one after the answer."""

from __future__ import annotations

import json
import os

URL = os.environ["CLIENT_URL"]
"""The server, without /v1."""
MODEL = os.environ["CLIENT_MODEL"]
KEY = "unused"
SYSTEM = "You answer questions about the weather. Use the tool `forecast`; do not guess."
FIRST = "What will the weather be like in Oslo tomorrow?"
SECOND = "And what about Bergen?"
TOOL_NAME = "forecast"
TOOL_DESCRIPTION = "Tells tomorrow's weather in a city."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": PARAMETERS},
}
"""The tool as chat completions declare it."""
MAX_TOKENS = int(os.environ["CLIENT_MAX_TOKENS"])
"""For each answer."""
AUTO_STEPS = 4
"""Steps in which the model may choose before a driver that can forbids calls: untrained weights may call for ever."""
CHOICES = ("required", *("auto",) * AUTO_STEPS, "none")
"""Tool choices of a question's steps, for clients that can say them."""

runs = 0
"""How often the client has run the tool."""


def forecast(city: str) -> str:
    """Tells tomorrow's weather in a city.

    Args:
        city: Name of the city.
    """
    global runs
    runs += 1
    return "rain, 9 degrees"


def report(**more: object) -> None:
    """The driver's last line: it got this far, so the client took every answer, whatever the model chose."""
    print(json.dumps({"tool_runs": runs, **more}))
