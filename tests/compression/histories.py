"""Histories for the tests of compression: written by hand, and random ones."""

from hypothesis import strategies as st

from agent_runtime.compression.count import ContextMeter, UsageMeter
from agent_runtime.compression.run import Compressor
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.conversation import Message, ToolCall
from agent_runtime.history import History
from agent_runtime.model import ModelClient
from agent_runtime.runstore import MemoryRunStore

SYSTEM = Message(role="system", content="be good")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def made(name: str, *results: str, content: str = "", reasoning: str = "think") -> list[Message]:
    """A turn with one call for each result; without results a turn that answers in text."""
    calls = tuple(ToolCall(f"{name}{n}", "look", f'{{"n": {n}}}') for n in range(len(results)))
    answer = Message(role="assistant", content=content or (None if results else name), reasoning=reasoning)
    answer = Message(role="assistant", content=answer.content or "", reasoning=reasoning, tool_calls=calls)
    return [
        answer,
        *(Message(role="tool", content=text, tool_call_id=call.id) for call, text in zip(calls, results, strict=True)),
    ]


def begun(*messages: Message) -> History:
    """A history with a log in memory."""
    return History.begin(MemoryRunStore(), TOOLS, messages, "s")


def work(turns: int = 3) -> list[Message]:
    """A task and some turns of two calls each."""
    steps = [message for n in range(turns) for message in made(f"t{n}-", f"result {n}", "more")]
    return [SYSTEM, user("task"), *steps]


def compressor(
    model: ModelClient,
    history: History,
    settings: CompressionSettings | None = None,
    meter: ContextMeter | None = None,
) -> Compressor:
    chosen = settings or CompressionSettings(trigger_tokens=100, backoff_s=0.0)
    return Compressor(model, history, meter or UsageMeter(), chosen, tools=TOOLS)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Valid histories with turns of up to four calls, tool declarations, and perhaps calls in flight at the end."""
    texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(lambda text: text.strip() != "")
    messages: list[Message] = [SYSTEM] if draw(st.booleans()) else []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["user", "turn", "turn", "declare"]))
        if kind == "user":
            messages.append(user(draw(texts)))
        elif kind == "declare":
            messages.append(Message(role="system", tools=({"type": "function", "function": {"name": f"d{number}"}},)))
        else:
            results = draw(st.lists(texts, max_size=4))
            messages += made(f"t{number}-", *results, content=draw(texts), reasoning=draw(texts))
    if draw(st.booleans()):
        flight = made("open-", *draw(st.lists(texts, min_size=1, max_size=4)))
        messages += flight[: 1 + draw(st.integers(0, len(flight) - 2))]
    return messages
