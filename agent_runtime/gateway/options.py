"""The fields of a chat completion that do not shape the prompt: validated, none silently ignored."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent_runtime.gateway.cache_fields import CacheFields, ExtensionFields
from agent_runtime.gateway.errors import ApiError
from k3_sglang.chat.errors import MAX_PARAM_CHARS
from k3_sglang.chat.request import PROMPT_FIELDS
from k3_sglang.chat.request_fields import shown

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_NAMED = 10
"""Faulty fields that one error names: what a client sent must not come back to it without bound."""

_AS_BY_ROUTERS = "a field of SGLang's, taken with the default that its router adds; leave it out"
REFUSED = {
    "logprobs": "log probabilities are not delivered: K3's text is spread over channels whose tokens are no text",
    "top_logprobs": "log probabilities are not delivered",
    "store": "completions are not stored; send false or leave it out",
    "service_tier": 'there is one tier; send "auto", "default" or leave it out',
    "modalities": 'the model answers in text only; send ["text"] or leave it out',
    "no_stop_trim": _AS_BY_ROUTERS,
    "ignore_eos": _AS_BY_ROUTERS,
    "continue_final_message": _AS_BY_ROUTERS,
    "skip_special_tokens": _AS_BY_ROUTERS,
    "separate_reasoning": _AS_BY_ROUTERS,
    "stream_reasoning": _AS_BY_ROUTERS,
    "return_hidden_states": _AS_BY_ROUTERS,
    "functions": "the predecessor of tools is not supported; use tools",
    "function_call": "the predecessor of tool_choice is not supported; use tool_choice",
}
"""Why a known field is refused, or allows only its neutral value."""

Model = TypeVar("Model", bound=BaseModel)
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


class Names(BaseModel):
    """The fields that may name the session."""

    model_config = ConfigDict(extra="forbid", strict=True)

    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    k3: ExtensionFields | None = None

    @property
    def cache(self) -> CacheFields | None:
        """``k3.cache``."""
        return self.k3.cache if self.k3 is not None else None


class ChatOptions(Names):
    """Every accepted field besides the prompt-shaping ones; null means absent, as OpenAI has it.

    ``user``, ``safety_identifier``, ``metadata``, ``prompt_cache_key`` and ``k3`` do not change the answer; what
    they are used for is said in docs/gateway.md.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # The engine keeps it in 32 bits, and its scheduler dies of a number that does not fit.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # Logits are divided by it: far below this they overflow, and sampling from NaN ends the engine.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None

    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None

    safety_identifier: str | None = None

    # SGLang's router writes its own fields with their defaults into every request that it passes on.
    no_stop_trim: Literal[False] | None = None
    ignore_eos: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    return_hidden_states: Literal[False] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatOptions":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        if self.top_k == 0:
            raise ValueError("top_k must be at least 1, or -1 for the whole vocabulary; 0 would leave no token")
        budgets = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(budgets) > 1:
            raise ValueError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} "
                "contradict each other; send one of them"
            )
        return self

    @property
    def output_budget(self) -> int | None:
        """The client's limit on output tokens."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, one or many."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


def parse_options(body: Mapping[str, Any]) -> ChatOptions:
    """Validate what is not the prompt. Raises ApiError 400 that names every faulty field."""
    rest = {key: value for key, value in body.items() if key not in PROMPT_FIELDS}
    return validated(ChatOptions, rest, refused=REFUSED, elsewhere=PROMPT_FIELDS)


def parse_names(body: Mapping[str, Any]) -> Names:
    """What names the session, of a body whose other fields are read elsewhere. Raises ApiError 400."""
    given = {key: body[key] for key in Names.model_fields if key in body}
    return validated(Names, given, refused={}, elsewhere=())


def validated(
    model: type[Model], values: Mapping[str, Any], *, refused: Mapping[str, str], elsewhere: Collection[str]
) -> Model:
    """The fields of a request as ``model``. ``refused`` has the reasons for fields that are known and not honoured,
    ``elsewhere`` the fields that are read by others.

    Raises ApiError 400 that names every faulty field.
    """
    unknown = [key for key in values if key not in model.model_fields]
    if unknown:
        raise _unknown(unknown, refused, {*model.model_fields, *elsewhere})
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    texts = [_problem(item["loc"], item["msg"], item["input"], refused) for item in problems]
    param = _field(problems[0]["loc"]) or None
    code = "unsupported_value" if param is not None and _head(param) in refused else "invalid_value"
    raise ApiError(400, "; ".join(dict.fromkeys(texts[:MAX_NAMED])), code=code, param=param)


def _field(location: tuple[int | str, ...]) -> str:
    """Path of a field, without pydantic's names for the alternatives of a union."""
    parts = [str(part) for part in location if isinstance(part, int) or part.isidentifier()]
    path = ".".join(part for part in parts if part not in ("str", "list"))
    return path[:MAX_PARAM_CHARS]


def _head(field: str) -> str:
    return field.partition(".")[0]


def _problem(location: tuple[int | str, ...], message: str, value: Any, refused: Mapping[str, str]) -> str:
    field = _field(location)
    if not field:
        return message.removeprefix("Value error, ")
    reason = refused.get(_head(field))
    return f"{field}={shown(value)}: {message}" + (f" ({reason})" if reason else "")


def _unknown(names: list[str], refused: Mapping[str, str], accepted: Collection[str]) -> ApiError:
    known = [f"{shown(name)} ({refused[name]})" if name in refused else shown(name) for name in names[:MAX_NAMED]]
    if len(names) > MAX_NAMED:
        known.append(f"{len(names) - MAX_NAMED} more")
    plural = "s" if len(names) > 1 else ""
    return ApiError(
        400,
        f"Unsupported field{plural}: {', '.join(known)}. Accepted: {', '.join(sorted(accepted))}.",
        code="unsupported_field",
        param=names[0][:MAX_PARAM_CHARS],
    )
