"""The error family of the chat protocol."""

MAX_PARAM_CHARS = 200


class ChatRequestError(ValueError):
    """A request the protocol cannot express; a gateway answers it with HTTP 400.

    `param` names the offending field (`messages[2].tool_calls[0].function.name`), `code` is a stable
    machine-readable reason and `message` says what was received, what is allowed and what to do. A path through
    keys that the client chose is cut to `MAX_PARAM_CHARS`.
    """

    def __init__(self, param: str, code: str, message: str) -> None:
        param = param if len(param) <= MAX_PARAM_CHARS else f"{param[:MAX_PARAM_CHARS]}..."
        super().__init__(f"{param}: {message}")
        self.param = param
        self.code = code
        self.message = message


class VocabularyError(ValueError):
    """A vocabulary file or tokenizer configuration that is not K3's."""
