"""Raw completions: a text or ids go to the engine as they are, and what it writes comes back as text."""

import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import anyio
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agent_runtime.engine.sglang import COLLECT_STREAM_INTERVAL
from agent_runtime.engine.types import Finish
from agent_runtime.errors import EngineError
from agent_runtime.gateway.answer import cancel_on_disconnect
from agent_runtime.gateway.completion import Usage
from agent_runtime.gateway.errors import ApiError, from_engine
from agent_runtime.gateway.job import Gateway
from agent_runtime.gateway.operations.meter import DONE, Meter
from agent_runtime.gateway.operations.traffic import ARRIVED_S
from agent_runtime.gateway.options import REFUSED, ChatOptions, validated
from agent_runtime.gateway.sampling import output_budget, require_fixed_sampling, sampling_params, without_media
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.stops import StopFinder
from agent_runtime.gateway.wire import usage_object
from k3_sglang.chat.json_types import is_list
from k3_sglang.chat.request_fields import shown
from k3_sglang.chat.tokenizer import IncrementalDecoder, K3Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
_REFUSED = {
    **REFUSED,
    "stream": "raw completions are not streamed; use /v1/chat/completions, or leave it out",
    "stream_options": "raw completions are not streamed",
    "n": "one completion at a time",
    "best_of": "one completion at a time",
    "echo": "the prompt is not sent back",
    "suffix": "the model does not fill in; send the text before",
    "k3": "a raw prompt is no conversation, so nothing is known about its session",
    "prompt_cache_key": "a raw prompt is no conversation, so nothing is known about its session",
    "max_completion_tokens": "here it is called max_tokens",
}


class CompletionOptions(ChatOptions):
    """Fields beside the prompt; those of chat completions mean the same."""

    stream: Literal[False] | None = None  # type: ignore[assignment]
    stream_options: None = None  # type: ignore[assignment]
    n: Literal[1] | None = None  # type: ignore[assignment]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    logprobs: None = None  # type: ignore[assignment]  # a number here
    k3: None = None  # type: ignore[assignment]  # nothing to say
    prompt_cache_key: None = None  # type: ignore[assignment]
    max_completion_tokens: None = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine is asked."""

    options: ChatOptions
    ids: tuple[int, ...]
    sampling: Mapping[str, Any]


def parse_completion(body: Mapping[str, Any], settings: GatewaySettings, tokenizer: K3Tokenizer) -> Prepared:
    """Check a request. Text never becomes a control token; ids may be any but those of pictures. Raises ApiError."""
    rest = {key: value for key, value in body.items() if key != "prompt"}
    options = validated(CompletionOptions, rest, refused=_REFUSED, elsewhere=("prompt",))
    require_fixed_sampling(options, settings)
    ids = _prompt_ids(body.get("prompt"), tokenizer)
    if options.max_tokens is None:
        options = options.model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
    try:
        budget = output_budget(options, settings, len(ids))
    except ApiError as error:
        raise ApiError(error.status, error.message, code=error.code, param="prompt") from error
    sampling = without_media(sampling_params(options, settings, tokenizer, budget), tokenizer)
    if not options.stops:
        sampling["stream_interval"] = COLLECT_STREAM_INTERVAL
    return Prepared(options, ids, sampling)


def _prompt_ids(prompt: Any, tokenizer: K3Tokenizer) -> tuple[int, ...]:
    if is_list(prompt) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt  # a batch of one
    special = tokenizer.special
    media = (special.media_begin, special.media_content, special.media_end, special.media_pad)
    ids: list[int] | None = None
    if isinstance(prompt, str):
        ids = tokenizer.encode_text(prompt)
    elif is_list(prompt) and all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in prompt):
        ids = prompt
    if not ids or any(token in media for token in ids):
        raise ApiError(
            400,
            f"prompt: got {shown(prompt)}; expected a text that is not empty, or ids from 0 to "
            f"{tokenizer.vocab_size - 1} without those of pictures ({', '.join(map(str, media))}); one prompt.",
            code="invalid_value",
            param="prompt",
        )
    return tuple(ids)


class TextCompletion:
    """An ASGI response that asks the engine while its client waits; nothing of it is put on record."""

    def __init__(self, gateway: Gateway, prepared: Prepared) -> None:
        self._gateway = gateway
        self._prepared = prepared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; when the client leaves, the engine is told."""
        meter = Meter(self._gateway.instruments, "completions", scope.get(ARRIVED_S))
        with meter:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel_on_disconnect, receive, tasks.cancel_scope)
                try:
                    answer = JSONResponse(await self._generate(meter))
                    meter.outcome = DONE
                except EngineError as error:
                    refusal = from_engine(error)
                    answer = refusal.response()
                    meter.failed(refusal, in_stream=False)
                await answer(scope, receive, send)
                tasks.cancel_scope.cancel()

    async def _generate(self, meter: Meter) -> dict[str, Any]:
        asked, tokenizer = self._prepared, self._gateway.tokenizer
        decoder, stops = IncrementalDecoder(tokenizer), StopFinder(asked.options.stops)
        pieces: list[str] = []
        tokens, cached_tokens, ended = 0, 0, False
        finish: Finish | None = None
        async with aclosing(self._gateway.engine.stream(asked.ids, asked.sampling, uuid4().hex)) as chunks:
            async for chunk in chunks:
                meter.first_token()
                cached_tokens, finish = chunk.cached_tokens, chunk.finish
                for token in chunk.ids:
                    tokens += 1
                    ended = tokenizer.is_special(token)  # a control token is no text: the completion ends there
                    if not ended:
                        pieces.append(stops.feed(decoder.feed([token])))
                    if ended or stops.found is not None:
                        break
                if ended or stops.found is not None:
                    break
        if stops.found is None:
            pieces += [stops.feed(decoder.finish()), stops.finish()]
        cut = not ended and stops.found is None and finish is not None and finish.type == "length"
        usage = Usage(len(asked.ids), cached_tokens, tokens, 0)
        meter.ended(usage, "length" if cut else "stop")
        return {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.options.model,
            "choices": [
                {"index": 0, "text": "".join(pieces), "logprobs": None, "finish_reason": "length" if cut else "stop"}
            ],
            "usage": usage_object([usage]),
        }
