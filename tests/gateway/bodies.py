"""Request bodies for any K3 gateway, scripted or real; nothing here depends on a fixture."""

from typing import Any

MODEL = "kimi-k3"

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of one city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def chat(text: str = "Hello", *, model: str = MODEL, **fields: Any) -> dict[str, Any]:
    """One user message."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def chat_with_tool(text: str = "Weather in Oslo?", **fields: Any) -> dict[str, Any]:
    """One user message and one tool."""
    return chat(text, tools=[WEATHER_TOOL], **fields)


def streamed(body: dict[str, Any], *, usage: bool = True) -> dict[str, Any]:
    """The same request as a stream."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    return {**body, "stream": True, **options}


def continued(body: dict[str, Any], answer: dict[str, Any], *following: dict[str, Any]) -> dict[str, Any]:
    """The next request of a session: the answer of ``body`` sent back as it came, then new messages."""
    return {**body, "messages": [*body["messages"], answer["choices"][0]["message"], *following]}


def tool_results(answer: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    """One result per call of an answer."""
    calls = answer["choices"][0]["message"]["tool_calls"]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)
    ]


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}
