"""Bodies of requests in any form, as a ledger keeps them, to bodies of chat completions."""

from typing import Any

from agent_runtime.gateway.anthropic.decode import decode


def chat_body(form: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat completion that asks the same. Raises ChatRequestError, and ValueError for other forms."""
    if form == "chat":
        return body
    if form == "messages":
        return decode(body).body
    raise ValueError(f"a body in the form {form!r} cannot be read; known are chat and messages")
