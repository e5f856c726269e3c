"""From a request body to everything a completion needs: validated, encoded, budgeted, constrained."""

import secrets
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

import anyio.to_thread

from agent_runtime.engine.sglang import COLLECT_STREAM_INTERVAL
from agent_runtime.engine.types import Engine
from agent_runtime.gateway.cache_fields import SESSION_HEADER, Session, find_session
from agent_runtime.gateway.cache_hints import cache_hints
from agent_runtime.gateway.cache_link import CacheLink
from agent_runtime.gateway.completion import Facts, Progress, WireForm
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.images import Fetched, ImageInput
from agent_runtime.gateway.operations.drain import Drain
from agent_runtime.gateway.operations.instruments import Instruments
from agent_runtime.gateway.options import ChatOptions, parse_names, parse_options
from agent_runtime.gateway.owner import NO_OWNER
from agent_runtime.gateway.positions import Mark, positions_of
from agent_runtime.gateway.record import Record, StepNumber
from agent_runtime.gateway.sampling import (
    for_choice,
    output_budget,
    require_fixed_sampling,
    sampling_params,
    without_media,
)
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.guard.history import NAMELESS, Scope
from agent_runtime.guard.prompt import ReplayedPrompt
from agent_runtime.guard.verdict import HistoryNotIntact
from agent_runtime.ledger.signatures import new_signature
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.grammar import turn_grammar
from k3_sglang.chat.json_types import is_list
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.request_fields import shown
from k3_sglang.chat.request_messages import image_sources
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest

KEEP_UP_S = 1.0
"""Between two looks at what other gateways have written."""
INLINE_BODY_BYTES = 32 * 1024
"""Larger requests, and all with images, are encoded on a thread, so that one does not hold up every stream."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts every request uses."""

    settings: GatewaySettings
    engine: Engine
    vocabulary: K3Tokenizer | None
    record: Record
    images: ImageInput
    encoded: EncodeCache
    cache: CacheLink
    drain: Drain
    instruments: Instruments | None
    foreign: "Foreign | None" = None
    owners: frozenset[str] = frozenset((NO_OWNER,))
    """Everybody who may ask: one that stands for all where there are no keys."""

    @property
    def tokenizer(self) -> K3Tokenizer:
        """The vocabulary. Raises ApiError before a server whose tokens this gateway does not know."""
        if self.vocabulary is None:
            raise ApiError(
                501,
                "This gateway stands before another server and has no vocabulary; tokenizer_dir gives it one.",
                code="no_vocabulary",
                type="server_error",
            )
        return self.vocabulary


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted completion.

    ``sampling`` and ``rids`` have one entry for each choice: what the engine is asked beside the ids. ``session`` is
    the client's name for the conversation; ``step`` its number on record.
    """

    request: ChatRequest
    options: ChatOptions
    replayed: ReplayedPrompt
    sampling: tuple[dict[str, Any], ...]
    rids: tuple[str, ...]
    facts: Facts
    session: Session | None
    step: StepNumber

    @property
    def n(self) -> int:
        """Number of choices."""
        return self.options.n or 1

    def headers(self) -> dict[str, str]:
        """Response headers about where the prompt came from."""
        headers = {"x-k3-replay": self.replayed.replay.header()}
        if self.session is not None and self.session.is_conversation:
            headers[SESSION_HEADER] = quote(self.session.name, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~")
        return headers


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its body as a chat completion's, the bytes as they were received, their form, the headers, and whose
    key it came with."""

    body: dict[str, Any]
    raw: bytes
    headers: Mapping[str, str]
    form: WireForm = "chat"
    owner: str = NO_OWNER


class Foreign(Protocol):
    """Another server in the place of engine and encoder."""

    def encode(self, asked: Asked, options: ChatOptions, gateway: Gateway) -> Job:
        """Check a request and write it as the server gets it. Raises ApiError; may run long."""
        ...

    def items(self, gateway: Gateway, job: Job, index: int) -> AsyncGenerator[Progress, None]:
        """One choice: its deltas and its end. Raises ApiError."""
        ...


async def prepare(asked: Asked, gateway: Gateway) -> Job:
    """Check and encode a request, once its images are there. Raises ApiError."""
    check_counts(asked.body, gateway.settings)
    options = _checked_options(asked.body, gateway.settings)
    await caught_up(gateway)
    if gateway.foreign is not None:
        write = partial(gateway.foreign.encode, asked, options, gateway)
        return write() if len(asked.raw) <= INLINE_BODY_BYTES else await anyio.to_thread.run_sync(write)
    sources = list(image_sources(asked.body))
    with refusals():
        fetched = await gateway.images.fetch(sources)
    encode = partial(_encode, asked, options, fetched, gateway)
    if len(asked.raw) <= INLINE_BODY_BYTES and not sources:
        return encode()
    return await anyio.to_thread.run_sync(encode)


async def caught_up(gateway: Gateway) -> None:
    """Know what other gateways of a shared ledger have generated; on a thread, since it may read a disk."""
    if gateway.record.is_shared:
        await anyio.to_thread.run_sync(gateway.record.catch_up)


async def keep_up(gateway: Gateway) -> None:
    """Do so again and again, so that no request finds much to read."""
    while gateway.record.is_shared:
        await anyio.sleep(KEEP_UP_S)
        await caught_up(gateway)


async def prompt_tokens(asked: Asked, gateway: Gateway) -> int:
    """Tokens of the prompt that a request would have, as `Usage` counts them. Raises ApiError."""
    return (await looked_at(asked, gateway)).prompt_tokens


async def looked_at(asked: Asked, gateway: Gateway) -> ReplayedPrompt:
    """The prompt that a request would have; nothing is asked of the engine. Raises ApiError."""
    check_counts(asked.body, gateway.settings)
    require_model(asked.body.get("model"), gateway.settings)
    await caught_up(gateway)
    names = parse_names(asked.body)
    session = find_session(asked.headers, names.cache, names.prompt_cache_key, names.metadata, names.user, asked.owner)
    with refusals():
        fetched = await gateway.images.fetch(list(image_sources(asked.body)))

    def look() -> ReplayedPrompt:
        with refusals():
            request = parse_request(asked.body, images=gateway.images.request_images(fetched))
            guard = gateway.record.guard(asked.owner)
            return guard.look(request, scope_of(session, asked.owner), gateway.tokenizer, gateway.encoded)

    return await anyio.to_thread.run_sync(look)


def check_counts(body: dict[str, Any], settings: GatewaySettings) -> None:
    """Raise ApiError for more messages or tools than a request may have."""
    for field, most in (("messages", settings.max_messages), ("tools", settings.max_tools)):
        value: Any = body.get(field)
        if is_list(value) and len(value) > most:
            raise ApiError(
                400,
                f"The request has {len(value)} {field}; this server takes at most {most}.",
                code=f"too_many_{field}",
                param=field,
            )


def _checked_options(body: dict[str, Any], settings: GatewaySettings) -> ChatOptions:
    options = parse_options(body)
    require_model(options.model, settings)
    require_fixed_sampling(options, settings)
    if (options.n or 1) > settings.max_choices:
        raise ApiError(
            400,
            f"n={shown(options.n)} is more than this server's limit of {settings.max_choices} choices.",
            code="unsupported_value",
            param="n",
        )
    return options


def _encode(asked: Asked, options: ChatOptions, fetched: Fetched, gateway: Gateway) -> Job:
    """Runs long for long histories and for images; touches no event loop."""
    settings = gateway.settings
    session = session_of(asked, options)
    guard = gateway.record.guard(asked.owner)
    with refusals():
        request = parse_request(asked.body, images=gateway.images.request_images(fetched))
        replayed = guard.build(request, scope_of(session, asked.owner), gateway.tokenizer, gateway.encoded)
        grammar = turn_grammar(request, request.start, force=settings.constrained_by_default)
    budget = output_budget(options, settings, replayed.prompt_tokens)
    sampling = sampling_params(options, settings, gateway.tokenizer, budget)
    if grammar is not None:
        sampling = {**sampling, **grammar.constraint()}  # a grammar has no place for ids of images
    elif gateway.images.media is not None:
        sampling = without_media(sampling, gateway.tokenizer)
    marks: tuple[Mark, ...] = ()
    hinted = settings.cache_hints and gateway.cache.active
    if hinted:
        found = positions_of(replayed, gateway.tokenizer)
        marks = found.marks
        hints = cache_hints(found, replayed.prompt_tokens, session, options.cache, time.time())
        sampling = {**sampling, "custom_params": hints}
    choices = tuple(_for_engine(sampling, options, index) for index in range(options.n or 1))
    # Ids of equal length: the engine aborts every request whose id begins with the one named.
    rids = tuple(uuid4().hex for _ in choices)
    facts = Facts(
        token=secrets.token_hex(16),
        created=int(time.time()),
        model=options.model,
        start=request.start,
        prompt_tokens=replayed.prompt_tokens,
        replay=replayed.replay,
        loosened=grammar.loosened if grammar is not None else (),
        session=session.id if session is not None else None,
        hinted=hinted,
        marks=marks,
        signatures=tuple(new_signature() for _ in choices),
    )
    engine = [{"rid": rid, "sampling_params": params} for rid, params in zip(rids, choices, strict=True)]
    return Job(
        request=request,
        options=options,
        replayed=replayed,
        sampling=choices,
        rids=rids,
        facts=facts,
        session=session,
        step=gateway.record.step(replayed, asked.raw, asked.form, engine),
    )


def session_of(asked: Asked, options: ChatOptions) -> Session | None:
    """The session that a request names."""
    names = (options.cache, options.prompt_cache_key, options.metadata, options.user)
    return find_session(asked.headers, *names, asked.owner)


def scope_of(session: Session | None, owner: str) -> Scope:
    """An owner's session as the guard knows it."""
    if session is None:
        return NAMELESS._replace(owner=owner)
    return Scope(session.record_name, session.is_conversation, owner)


def history_ids(asked: Asked, gateway: Gateway) -> list[int]:
    """Ids of the messages of a body without images, as a request for their next turn would have them.

    Without what is for one turn only. The session is named by a header. Raises ApiError; runs long.
    """
    check_counts(asked.body, gateway.settings)
    scope = scope_of(find_session(asked.headers, None, None, None, None, asked.owner), asked.owner)
    guard = gateway.record.guard(asked.owner)
    gateway.record.catch_up()
    with refusals():
        replayed = guard.look(parse_request(asked.body), scope, gateway.tokenizer, gateway.encoded)
        end = positions_of(replayed, gateway.tokenizer).history_len
        return list(replayed.prompt.ids[:end])


@contextmanager
def refusals() -> Generator[None, None, None]:
    """What the chat format or the guard refuses becomes the answer to the client."""
    try:
        yield
    except ChatRequestError as error:
        raise ApiError(400, str(error), code=error.code, param=error.param) from error
    except HistoryNotIntact as error:
        param = f"messages[{error.checks[0].at}]"
        raise ApiError(409, str(error), code="history_not_intact", param=param) from error
    except RecursionError as error:
        raise ApiError(400, "The request is nested too deeply.", code="invalid_json") from error


def _for_engine(sampling: dict[str, Any], options: ChatOptions, index: int) -> dict[str, Any]:
    params = for_choice(sampling, index)
    if options.stream or options.stops:
        return params
    return {**params, "stream_interval": COLLECT_STREAM_INTERVAL}


def require_model(model: object, settings: GatewaySettings) -> None:
    """Raise ApiError 404 for a model that is not served here."""
    served = (settings.model, *settings.model_aliases)
    if model not in served:
        raise ApiError(
            404,
            f"The model {shown(model)} is not served here; use {' or '.join(map(repr, served))}.",
            code="model_not_found",
            param="model",
        )
