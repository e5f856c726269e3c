"""The error family of the chat protocol."""


class ChatRequestError(ValueError):
    """A request the protocol cannot express; a gateway answers it with HTTP 400.

    `param` names the offending field (`messages[2].tool_calls[0].function.name`), `code` is a stable
    machine-readable reason and `message` says what was received, what is allowed and what to do.
    """

    def __init__(self, param: str, code: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.code = code
        self.message = message


class VocabularyError(ValueError):
    """A vocabulary file or tokenizer configuration that is not K3's."""
