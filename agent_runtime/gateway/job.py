"""From a request body to everything a completion needs: validated, encoded, budgeted, constrained."""

import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import anyio.to_thread

from agent_runtime.engine.types import Engine
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.images import Fetched, ImageInput
from agent_runtime.gateway.options import ChatOptions, parse_options
from agent_runtime.gateway.prompt import ReplayedPrompt, build_prompt
from agent_runtime.gateway.sampling import output_budget, sampling_params, without_media
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.wire import Envelope
from agent_runtime.ledger.recorded import RecordedTurns
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.grammar import turn_grammar
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.request_fields import shown
from k3_sglang.chat.request_messages import image_sources
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest

INLINE_BODY_BYTES = 32 * 1024
"""Larger requests, and all with images, are encoded on a thread, so that one does not hold up every stream."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts every request uses."""

    settings: GatewaySettings
    engine: Engine
    tokenizer: K3Tokenizer
    recorded: RecordedTurns
    images: ImageInput
    encoded: EncodeCache


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted completion. ``session`` is the client's name for the conversation, "" without one."""

    request: ChatRequest
    options: ChatOptions
    replayed: ReplayedPrompt
    sampling: dict[str, Any]
    envelope: Envelope
    session: str

    @property
    def n(self) -> int:
        """Number of choices."""
        return self.options.n or 1

    def headers(self) -> dict[str, str]:
        """Response headers about where the prompt came from."""
        headers = {"x-k3-replay": self.replayed.replay.header()}
        if self.session:
            headers["x-k3-session"] = quote(self.session, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~")
        return headers


async def prepare(body: dict[str, Any], body_bytes: int, session_header: str, gateway: Gateway) -> Job:
    """Check and encode a request, once its images are there. Raises ApiError."""
    options = _checked_options(body, gateway.settings)
    sources = list(image_sources(body))
    try:
        fetched = await gateway.images.fetch(sources)
    except ChatRequestError as error:
        raise _bad_request(error) from error
    encode = partial(_encode, body, options, session_header, fetched, gateway)
    if body_bytes <= INLINE_BODY_BYTES and not sources:
        return encode()
    return await anyio.to_thread.run_sync(encode)


def _checked_options(body: dict[str, Any], settings: GatewaySettings) -> ChatOptions:
    options = parse_options(body)
    _require_model(options.model, settings)
    if (options.n or 1) > settings.max_choices:
        raise ApiError(
            400,
            f"n={shown(options.n)} is more than this server's limit of {settings.max_choices} choices.",
            code="unsupported_value",
            param="n",
        )
    return options


def _encode(body: dict[str, Any], options: ChatOptions, session_header: str, fetched: Fetched, gateway: Gateway) -> Job:
    """Runs long for long histories and for images; touches no event loop."""
    settings = gateway.settings
    try:
        request = parse_request(body, images=gateway.images.request_images(fetched))
        replayed = build_prompt(request, gateway.tokenizer, gateway.recorded, gateway.encoded)
        grammar = turn_grammar(request, request.start, force=settings.constrained_by_default)
    except ChatRequestError as error:
        raise _bad_request(error) from error
    except RecursionError as error:
        raise ApiError(400, "The request is nested too deeply.", code="invalid_json") from error
    budget = output_budget(options, settings, replayed.prompt_tokens)
    sampling = sampling_params(options, settings, gateway.tokenizer, budget)
    if grammar is not None:
        sampling = {**sampling, **grammar.constraint()}  # a grammar has no place for ids of images
    elif gateway.images.media is not None:
        sampling = without_media(sampling, gateway.tokenizer)
    loosened = grammar.loosened if grammar is not None else ()
    envelope = Envelope(f"chatcmpl-{secrets.token_hex(16)}", int(time.time()), options.model, replayed.replay, loosened)
    return Job(
        request=request,
        options=options,
        replayed=replayed,
        sampling=sampling,
        envelope=envelope,
        session=session_header or options.prompt_cache_key or "",
    )


def _bad_request(error: ChatRequestError) -> ApiError:
    return ApiError(400, str(error), code=error.code, param=error.param)


def _require_model(model: str, settings: GatewaySettings) -> None:
    served = (settings.model, *settings.model_aliases)
    if model not in served:
        raise ApiError(
            404,
            f"The model {shown(model)} is not served here; use {' or '.join(map(repr, served))}.",
            code="model_not_found",
            param="model",
        )
