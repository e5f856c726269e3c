"""The tools of the small world: what they are called, what they take, what users ask of them and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from k3_sglang.tiny.data.names import Draw

Value: TypeAlias = str | int | bool
Maker: TypeAlias = Callable[[Draw], Value]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: its schema's type, what it is, and how a value is made."""

    type: str
    description: str
    make: Maker
    allowed: tuple[str, ...] = ()
    """Values of an enumeration; empty for any."""

    def schema(self) -> dict[str, Any]:
        """The parameter's JSON schema."""
        found: dict[str, Any] = {"type": self.type, "description": self.description}
        return found | ({"enum": list(self.allowed)} if self.allowed else {})


@dataclass(frozen=True, slots=True)
class ToolKind:
    """One tool. Texts hold `{parameter}` and, in result and answer, `{n}` (a number) or `{r}` (a name)."""

    name: str
    description: str
    parameters: Mapping[str, Parameter]
    asks: tuple[str, ...]
    result: str
    answer: str

    def schema(self, name: str | None = None, renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The tool's declaration, under another name and with other names of its parameters if wanted.

        Parameters are in the order of their names, which is the order in which K3's prompt shows them.
        """
        names = {key: (renamed or {}).get(key, key) for key in self.parameters}
        shown = {names[key]: parameter.schema() for key, parameter in self.parameters.items()}
        properties = dict(sorted(shown.items()))
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": name or self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _one_of(*options: str) -> Maker:
    return lambda draw: draw.pick(options)


def _text(description: str, make: Maker = Draw.name) -> Parameter:
    return Parameter("string", description, make)


def _number(description: str, low: int = 2, high: int = 500) -> Parameter:
    return Parameter("integer", description, lambda draw: draw.number(low, high))


def _choice(description: str, *options: str) -> Parameter:
    return Parameter("string", description, _one_of(*options), options)


_DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday")
_SENTENCES: Final = ("I am late", "lunch is ready", "please call me", "the door is open", "all is done", "see you soon")

KINDS: Final = (
    ToolKind(
        "get_weather",
        "Current weather in a city.",
        {"city": _text("Name of the city.")},
        ("What is the weather in {city}?", "How is the weather in {city} today?", "Is it cold in {city}?"),
        "{n} degrees",
        "In {city} it is {n} degrees.",
    ),
    ToolKind(
        "get_time",
        "Local time in a city.",
        {"city": _text("Name of the city.")},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        "{n} minutes after noon",
        "In {city} it is {n} minutes after noon.",
    ),
    ToolKind(
        "send_message",
        "Send a text message to a person.",
        {"to": _text("Who gets it."), "text": _text("What it says.", _one_of(*_SENTENCES))},
        ("Tell {to}: {text}", "Send {to} a message: {text}", "Write to {to}: {text}"),
        "sent, number {n}",
        "I sent {to} the message.",
    ),
    ToolKind(
        "set_timer",
        "Start a timer.",
        {"minutes": _number("How long.")},
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a timer of {minutes} minutes."),
        "timer {r} started",
        "Timer {r} runs for {minutes} minutes.",
    ),
    ToolKind(
        "get_price",
        "Price of an item.",
        {"item": _text("The item.")},
        ("What does {item} cost?", "What is the price of {item}?", "How much is {item}?"),
        "{n}",
        "{item} costs {n}.",
    ),
    ToolKind(
        "get_stock",
        "How many pieces of an item are in stock.",
        {"item": _text("The item.")},
        ("How many {item} are in stock?", "Do we have {item} in stock?"),
        "{n}",
        "{n} pieces of {item} are in stock.",
    ),
    ToolKind(
        "order_item",
        "Order pieces of an item.",
        {"item": _text("The item."), "count": _number("How many pieces.", 2, 99)},
        ("Order {count} pieces of {item}.", "Please buy {count} {item}."),
        "order {r}",
        "I ordered {count} pieces of {item}, order {r}.",
    ),
    ToolKind(
        "book_room",
        "Book a room for a day.",
        {"room": _text("Name of the room."), "day": _choice("Day of the week.", *_DAYS)},
        ("Book room {room} on {day}.", "I need room {room} on {day}.", "Reserve {room} for {day}, please."),
        "booked, number {n}",
        "Room {room} is booked on {day}, number {n}.",
    ),
    ToolKind(
        "find_person",
        "Phone number of a person.",
        {"name": _text("Name of the person.")},
        ("What is the phone number of {name}?", "How can I call {name}?", "Find the number of {name}."),
        "{n}",
        "The number of {name} is {n}.",
    ),
    ToolKind(
        "play_song",
        "Play a song.",
        {"title": _text("Title of the song."), "volume": _number("How loud.", 2, 99)},
        ("Play {title} at volume {volume}.", "Play the song {title}, volume {volume}."),
        "playing",
        "{title} is playing at volume {volume}.",
    ),
    ToolKind(
        "switch_device",
        "Turn a device on or off.",
        {"device": _text("Name of the device."), "state": _choice("What it shall be.", "on", "off")},
        ("Turn {device} {state}.", "Switch the {device} {state}.", "Please turn {state} the {device}."),
        "{state}",
        "{device} is {state}.",
    ),
    ToolKind(
        "move_file",
        "Move a file to another place.",
        {"source": _text("Where it is.", Draw.path), "target": _text("Where it shall be.", Draw.path)},
        ("Move {source} to {target}.", "Rename {source} to {target}.", "Put {source} at {target}."),
        "moved",
        "I moved {source} to {target}.",
    ),
    ToolKind(
        "count_lines",
        "Count the lines of a file.",
        {"path": _text("The file.", Draw.path)},
        ("How many lines has {path}?", "Count the lines of {path}.", "How long is {path}?"),
        "{n}",
        "{path} has {n} lines.",
    ),
    ToolKind(
        "delete_file",
        "Delete a file.",
        {"path": _text("The file.", Draw.path)},
        ("Delete {path}.", "Remove the file {path}.", "I do not need {path} any more, delete it."),
        "deleted",
        "I deleted {path}.",
    ),
    ToolKind(
        "add_numbers",
        "Add two numbers.",
        {"a": _number("The first.", 100, 9999), "b": _number("The second.", 100, 9999)},
        ("What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} and {b} together?"),
        "{n}",
        "{a} plus {b} is {n}.",
    ),
    ToolKind(
        "translate",
        "Translate a word into a language.",
        {
            "word": _text("The word."),
            "language": _choice("The language.", "french", "german", "spanish", "italian"),
        },
        ("What is {word} in {language}?", "Translate {word} into {language}.", "Say {word} in {language}."),
        "{r}",
        "{word} is {r} in {language}.",
    ),
    ToolKind(
        "get_code",
        "Look up the code of a project.",
        {"project": _text("Name of the project.")},
        ("What is the code of project {project}?", "Look up the code of {project}.", "I need the code of {project}."),
        "{r}-{n}",
        "The code of {project} is {r}-{n}.",
    ),
    ToolKind(
        "create_user",
        "Create a user with a role.",
        {
            "name": _text("Name of the user."),
            "admin": Parameter("boolean", "Whether an admin.", lambda d: d.chance(0.5)),
        },
        ("Create a user {name}, admin {admin}.", "Add the user {name} with admin {admin}."),
        "user {n}",
        "The user {name} has number {n}.",
    ),
)
