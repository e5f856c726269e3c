"""Small talk, small sums and copying: what a newcomer tries first, and the first thing a model learns."""

from __future__ import annotations

from typing import Final

from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.sample import Talk

_ABOUT: Final = "I am a tiny K3, a model of a few million parameters that comes with k3-sglang."
_CAN: Final = "I can call tools, read files, run tests, fix a small bug, and remember what I thought."

REPLIES: Final = (
    (("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning!", "hello", "hi"), "Hello! What can I do for you?"),
    (("Who are you?", "What are you?", "What is your name?", "who are you"), _ABOUT),
    (("What can you do?", "Help", "help", "What are you good at?", "How can you help me?"), _CAN),
    (("Thanks", "Thank you!", "Thanks a lot.", "thanks"), "You are welcome."),
    (("How are you?", "How are you today?", "how are you"), "I am well, thank you. What can I do for you?"),
    (("Bye", "Goodbye!", "See you.", "bye"), "Goodbye!"),
    (("ok", "OK.", "Fine.", "Good."), "Good. What is next?"),
    (
        ("What is the capital of France?", "Tell me a joke.", "Write a poem.", "Who won the game?", "What is love?"),
        "I do not know. I am a tiny model and know nothing of the world.",
    ),
)


def chatter(draw: Draw, talk: Talk) -> None:
    """One user turn that needs no tool."""
    kind = draw.rng.random()
    if kind < 0.4:
        asks, reply = draw.pick(REPLIES)
        talk.user(draw.pick(asks))
        talk.answer(reply, think="Small talk.")
    elif kind < 0.7:
        _sum(draw, talk)
    else:
        repeat(draw, talk)


def _sum(draw: Draw, talk: Talk) -> None:
    first, second = draw.rng.randint(0, 6), draw.rng.randint(0, 6)
    if draw.chance(0.3):
        first, second = max(first, second), min(first, second)
        words, value = ("minus", "-"), first - second
    else:
        words, value = ("plus", "+"), first + second
    talk.user(
        draw.pick(("What is {} {} {}?", "How much is {} {} {}?", "{} {} {} =")).format(first, draw.pick(words), second)
    )
    talk.answer(f"{first} {words[1]} {second} = {value}", think="A small sum.")


def repeat(draw: Draw, talk: Talk, most: int = 3) -> None:
    """One user turn whose answer is in it."""
    items = [_item(draw) for _ in range(draw.rng.randint(1, most))]
    shown = " ".join(items)
    kind = draw.pick(("all", "all", "first", "last"))
    if kind == "all":
        talk.user(draw.pick(("Repeat: {}", "Say this: {}", "Say {}", "Please repeat {}")).format(shown))
        talk.answer(shown, think="Repeat.")
    else:
        talk.user(draw.pick(("What is the {} of these: {}", "Say only the {} one: {}")).format(kind, shown))
        talk.answer(items[0 if kind == "first" else -1], think=f"Only the {kind}.")


def _item(draw: Draw) -> str:
    kind = draw.rng.random()
    if kind < 0.35:
        return draw.name()
    if kind < 0.5:
        return draw.code()
    if kind < 0.75:
        return str(draw.number())
    return draw.path() if kind < 0.9 else draw.word()


def small_talk(draw: Draw) -> Talk:
    """A chat without tools."""
    talk = Talk("chat", system=draw.pick((None, None, "You are a helpful assistant.")))
    for _ in range(draw.rng.randint(2, 5)):
        chatter(draw, talk)
    return talk


def copying(draw: Draw) -> Talk:
    """The shortest task: say again what the user said, more of it with every turn."""
    talk = Talk("copy")
    for _ in range(draw.rng.randint(3, 6)):
        repeat(draw, talk, most=6)
    return talk
