"""The exceptions of the package, as one tree.

AgentRuntimeError
├── EngineError                 the token engine could not do what was asked
│   ├── EngineUnavailable       not reachable, overloaded, or it died: worth a retry
│   │   └── EngineTimeout       reachable, but silent for longer than allowed
│   ├── EngineRejected          it refused this request: a retry gives the same answer
│   ├── EngineAborted           it ended the request early, on our word or its own
│   └── EngineProtocolError     its answer does not follow /generate: a version mismatch or a bug
├── AgentBusy                   a conversation has one run at a time
├── LedgerError                 a ledger that cannot be opened, read or written
└── SettingsError               a settings file that cannot be used
"""


class AgentRuntimeError(Exception):
    """Root of every error this package raises on purpose."""


class AgentBusy(AgentRuntimeError, RuntimeError):
    """The agent is in the middle of a run."""


class EngineError(AgentRuntimeError):
    """A request to the engine failed. ``rid`` is the engine's request id, when one was sent."""

    def __init__(self, message: str, rid: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.rid = rid


class EngineUnavailable(EngineError):
    """The engine is unreachable, overloaded or gone; the same request may succeed later."""


class EngineTimeout(EngineUnavailable):
    """The engine accepted the request and then sent nothing for longer than allowed."""


class EngineRejected(EngineError):
    """The engine refused the request for what it says, e.g. a prompt larger than its pool."""


class EngineAborted(EngineError):
    """The engine ended the request before it was complete, and there is no one to blame in the request."""


class EngineProtocolError(EngineError):
    """The engine's answer cannot be understood; carries what was expected and what came."""


class SettingsError(AgentRuntimeError):
    """A settings file is missing, not JSON, or holds a wrong value; the message names the key."""


class LedgerError(AgentRuntimeError):
    """A ledger cannot be opened, read or written; the message names the file."""
