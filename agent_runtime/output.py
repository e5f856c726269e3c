"""A final answer in a wanted form: asked for at the end of the history, checked, asked for again with the reason."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError


class OutputForm:
    """The form of one run's final answer.

    The model works as usual; when it is done, the answer is taken if it is JSON of the form already. Otherwise one more
    message asks for it, with the schema as the response format of that call only: nothing before it moves.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model
        self._problem = ""
        self.asked = False
        """Whether an answer in the form has been asked for."""
        self.tries = 0
        """Answers in the form that were asked for."""
        self.value: BaseModel | None = None
        """The accepted answer."""

    @property
    def response_format(self) -> dict[str, Any]:
        """The response format of a request."""
        schema = {"name": self._model.__name__, "schema": self._model.model_json_schema(), "strict": True}
        return {"type": "json_schema", "json_schema": schema}

    def accepts(self, text: str) -> bool:
        """Whether a text is an answer in the form; it is then `value`."""
        try:
            self.value = self._model.model_validate_json(_unfenced(text), strict=True)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, e['loc'])) or 'the answer'}: {e['msg']}" for e in error.errors())
            self._problem = "\n".join(f"- {line}" for line in lines)
            return False
        return True

    def request(self) -> str:
        """The user message that asks for the answer, with what was wrong if one was asked for before."""
        again, self.asked = self.asked, True
        self.tries += 1
        if again:
            return f"That is not in the wanted form:\n{self._problem}\nGive the whole result again, as JSON only."
        return "Now give the final result in the wanted form: one JSON value that follows the schema, and nothing else."


def _unfenced(text: str) -> str:
    """The inside of a text that is one code block."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped:
        return stripped.split("\n", 1)[1].removesuffix("```")
    return stripped
