"""The fields of a Responses request that are not its conversation: validated, none silently ignored."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_runtime.gateway.options import validated

ENCRYPTED_REASONING = "reasoning.encrypted_content"
IMAGE_URLS = "message.input_image.image_url"

CONVERSATION_FIELDS: frozenset[str] = frozenset(("input", "tools", "tool_choice", "text", "reasoning"))
"""Read elsewhere."""
PASSED_ON = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "safety_identifier",
    "service_tier", "prompt_cache_key", "k3", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "stop",
)  # fmt: skip
"""Fields that mean what they mean in a chat completion, and are checked there."""
REFUSED = {
    "conversation": "there are no stored conversations; send previous_response_id, or the items themselves",
    "prompt": "there are no stored prompts; send instructions and input",
    "context_management": "nothing is compacted or cleared here: that would take thinking from the model",
    "max_tool_calls": "the server runs no tools, so there are none to count",
    "truncation": 'no item is ever dropped; send "disabled" or leave it out',
    "top_logprobs": "log probabilities are not delivered",
    "prompt_cache_retention": 'prompts are kept in memory; for a time of your own see k3.cache. Send "in_memory"',
    "stream_options": "the only option is include_obfuscation, false: events are not padded",
    "priority": "there is one queue; SGLang's router adds 0, which is taken",
    "include": "nothing else of this list exists here",
}
"""Why a known field is refused, or allows only its neutral value."""


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: Literal[False] | None = None


class ResponseFields(BaseModel):
    """Every field with a meaning of its own in this protocol; null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[Literal["reasoning.encrypted_content", "message.input_image.image_url"]] | None = None

    client_metadata: dict[str, str] | None = None
    """What a client tells of itself (Codex does): not shown to the model, not used, not sent back."""

    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    conversation: None = None
    prompt: None = None
    context_management: None = None
    max_tool_calls: None = None
    priority: Literal[0] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ResponseFields":
        if self.background and self.store is False:
            raise ValueError("background=true needs store: a response that is not stored could never be fetched")
        if self.background and self.stream:
            raise ValueError("background=true with stream=true is not offered: fetch the response until it is done")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    @property
    def stored(self) -> bool:
        """Whether the response is kept, as it is unless the client forbids it."""
        return self.store is not False

    @property
    def shows_signature(self) -> bool:
        """Whether reasoning items carry the text that leads back to their turn."""
        return not self.stored or ENCRYPTED_REASONING in (self.include or ())


def parse_fields(body: Mapping[str, Any]) -> ResponseFields:
    """Validate. Raises ApiError 400 that names every faulty field."""
    others = {*CONVERSATION_FIELDS, *PASSED_ON} - {"stream"}
    rest = {key: value for key, value in body.items() if key not in others}
    return validated(ResponseFields, rest, refused=REFUSED, elsewhere=others)
