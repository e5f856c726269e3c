"""Where the output parser is inside a turn."""

from enum import Enum


class State(Enum):
    """Where the parser is; the value is the element's name, or begins with a space where the state is no element."""

    THINK = "think"
    RESPONSE = "response"
    TOOLS = "tools"
    CALL = "call"
    ARGUMENT = "argument"
    JSON = "json"
    BETWEEN = " think closed, no answer yet"
    AFTER = " response or tools closed"
    JUNK = " inside something dropped"
    CLOSED = " message closed"
    END = " turn over"


IN_CALL = (State.CALL, State.ARGUMENT, State.JSON)
ORDER = (State.THINK, State.RESPONSE, State.TOOLS)
"""The channels of a turn in the order in which they may come."""
