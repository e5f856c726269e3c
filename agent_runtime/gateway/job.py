"""From a request body to everything a completion needs: validated, encoded, budgeted, constrained."""

import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import anyio.to_thread

from agent_runtime.engine.types import Engine
from agent_runtime.gateway.cache_fields import SESSION_HEADER, Session, find_session
from agent_runtime.gateway.cache_hints import cache_hints
from agent_runtime.gateway.cache_link import CacheLink
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
    cache: CacheLink


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted completion. ``session`` is the client's name for the conversation."""

    request: ChatRequest
    options: ChatOptions
    replayed: ReplayedPrompt
    sampling: dict[str, Any]
    envelope: Envelope
    session: Session | None

    @property
    def n(self) -> int:
        """Number of choices."""
        return self.options.n or 1

    def headers(self) -> dict[str, str]:
        """Response headers about where the prompt came from."""
        headers = {"x-k3-replay": self.replayed.replay.header()}
        if self.session is not None and self.session.source != "user":
            headers[SESSION_HEADER] = quote(self.session.name, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~")
        return headers


async def prepare(body: dict[str, Any], body_bytes: int, headers: Mapping[str, str], gateway: Gateway) -> Job:
    """Check and encode a request, once its images are there. Raises ApiError."""
    options = _checked_options(body, gateway.settings)
    sources = list(image_sources(body))
    with _refusals():
        fetched = await gateway.images.fetch(sources)
    encode = partial(_encode, body, options, headers, fetched, gateway)
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


def _encode(
    body: dict[str, Any], options: ChatOptions, headers: Mapping[str, str], fetched: Fetched, gateway: Gateway
) -> Job:
    """Runs long for long histories and for images; touches no event loop."""
    settings = gateway.settings
    with _refusals():
        request = parse_request(body, images=gateway.images.request_images(fetched))
        replayed = build_prompt(request, gateway.tokenizer, gateway.recorded, gateway.encoded)
        grammar = turn_grammar(request, request.start, force=settings.constrained_by_default)
    budget = output_budget(options, settings, replayed.prompt_tokens)
    sampling = sampling_params(options, settings, gateway.tokenizer, budget)
    if grammar is not None:
        sampling = {**sampling, **grammar.constraint()}  # a grammar has no place for ids of images
    elif gateway.images.media is not None:
        sampling = without_media(sampling, gateway.tokenizer)
    session = find_session(headers, options.cache, options.prompt_cache_key, options.metadata, options.user)
    hinted = settings.cache_hints and gateway.cache.active
    if hinted:
        hints = cache_hints(replayed.positions, replayed.prompt_tokens, session, options.cache, time.time())
        sampling = {**sampling, "custom_params": hints}
    envelope = Envelope(
        f"chatcmpl-{secrets.token_hex(16)}",
        int(time.time()),
        options.model,
        replayed.replay,
        grammar.loosened if grammar is not None else (),
        session.id if session is not None else None,
        hinted,
    )
    return Job(
        request=request,
        options=options,
        replayed=replayed,
        sampling=sampling,
        envelope=envelope,
        session=session,
    )


def text_prompt(body: dict[str, Any], gateway: Gateway) -> ReplayedPrompt:
    """The prompt of the prompt-shaping fields of a body without images. Raises ApiError; runs long."""
    with _refusals():
        return build_prompt(parse_request(body), gateway.tokenizer, gateway.recorded, gateway.encoded)


@contextmanager
def _refusals() -> Generator[None, None, None]:
    """What the chat format refuses becomes the answer to the client."""
    try:
        yield
    except ChatRequestError as error:
        raise ApiError(400, str(error), code=error.code, param=error.param) from error
    except RecursionError as error:
        raise ApiError(400, "The request is nested too deeply.", code="invalid_json") from error


def _require_model(model: str, settings: GatewaySettings) -> None:
    served = (settings.model, *settings.model_aliases)
    if model not in served:
        raise ApiError(
            404,
            f"The model {shown(model)} is not served here; use {' or '.join(map(repr, served))}.",
            code="model_not_found",
            param="model",
        )
