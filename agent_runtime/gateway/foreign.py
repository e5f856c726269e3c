"""Completions by another server of K3: the guard's messages out, its stream back, the turn on record."""

import os
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from uuid import uuid4

import anyio

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.choice import Delivered, FinishReason, IncompleteCall
from agent_runtime.gateway.completion import Began, ChoiceEnd, Facts, NewDelta, Progress, Usage
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.foreign_engine import ForeignEngine
from agent_runtime.gateway.foreign_fields import body_fields, check, for_choice
from agent_runtime.gateway.job import Asked, Gateway, Job, refusals, scope_of, session_of
from agent_runtime.gateway.options import ChatOptions
from agent_runtime.gateway.sampling import output_budget
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.stops import StopFinder
from agent_runtime.guard.repair import Mode
from agent_runtime.ledger.call_ids import new_call_id
from agent_runtime.ledger.signatures import new_signature
from agent_runtime.ledger.turns import TurnIndex
from agent_runtime.upstream.again import body_digest, request_body
from agent_runtime.upstream.client import UpstreamClient
from agent_runtime.upstream.errors import UpstreamError, broken
from agent_runtime.upstream.guard import MessageGuard, MessagePrompt, passed_through
from agent_runtime.upstream.profiles import PROFILES
from agent_runtime.upstream.turn import ReceivedTurn, TurnReader
from agent_runtime.upstream.wire import json_bytes
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.types import JSONObject

AFTER_FINISH_S = 10.0
"""Silence after the finish reason at which an answer counts as complete without its counts."""


class ForeignServer:
    """The server that the settings name, and what this gateway knows about its kind.

    Raises SettingsError when the key cannot be read.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        assert settings.upstream_url is not None, "checked by the settings"
        self.profile = PROFILES[settings.upstream_profile]
        self._model = settings.upstream_model or settings.model
        self._client = UpstreamClient(
            settings.upstream_url,
            _key(settings),
            connect_timeout_s=settings.engine_connect_timeout_s,
            idle_timeout_s=settings.engine_idle_timeout_s,
        )

    def engine(self) -> ForeignEngine:
        """What stands in the engine's place."""
        return ForeignEngine(self._client, self._model)

    def make_guard(self, index: TurnIndex, mode: Mode) -> MessageGuard:
        """The guard of this kind of server."""
        return MessageGuard(index, mode, profile=self.profile)

    def encode(self, asked: Asked, options: ChatOptions, gateway: Gateway) -> Job:
        """Check a request and write it as the server gets it. Raises ApiError."""
        session = session_of(asked, options)
        guard = gateway.record.guard(asked.owner)
        assert isinstance(guard, MessageGuard)
        with refusals():
            request = parse_request(asked.body, images=passed_through)
            check(request, options, self.profile)
            scope = scope_of(session, asked.owner)
            prompt = guard.ask(request, scope, asked.body, gateway.vocabulary, gateway.encoded)
        fields = body_fields(options, self.profile, _budget(options, gateway.settings, prompt))
        each = [for_choice(fields, index) for index in range(options.n or 1)]
        choices = tuple(request_body(self._model, prompt, fields) for fields in each)
        facts = Facts(
            token=secrets.token_hex(16),
            created=int(time.time()),
            model=options.model,
            start=request.start,
            prompt_tokens=prompt.counted or 0,
            replay=prompt.replay,
            loosened=(),
            session=session.id if session is not None else None,
            hinted=False,
            marks=(),
            signatures=tuple(new_signature() for _ in choices),
        )
        return Job(
            request=request,
            options=options,
            replayed=prompt,
            sampling=choices,
            rids=tuple(uuid4().hex for _ in choices),
            facts=facts,
            session=session,
            step=gateway.record.step(prompt, asked.raw, asked.form, (), self._facts(each, choices)),
        )

    async def items(self, gateway: Gateway, job: Job, index: int) -> AsyncGenerator[Progress, None]:
        """One choice, by a request of its own. Raises ApiError."""
        reader = TurnReader(
            self.profile,
            StopFinder(job.options.stops),
            calls_allowed=job.request.tools_callable,
            new_call_id=new_call_id,
        )
        try:
            async with aclosing(self._client.stream(json_bytes(job.sampling[index]))) as chunks:
                began = False
                while (chunk := await _next(chunks, reader)) is not None:
                    if not began:
                        began = True
                        yield Began(index, 0)  # how much was cached is told with the counts, at the end
                    for delta in reader.feed(chunk):
                        yield NewDelta(index, delta)
                    if reader.stopped:
                        break
            if not (reader.finished or reader.stopped):
                raise broken("its stream ended without a finish reason")
            deltas, turn = reader.finish()
        except UpstreamError as error:
            raise api_error(error) from error
        for delta in deltas:
            yield NewDelta(index, delta)
        counts = turn.counts
        usage = Usage(counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens, counts.reasoning_tokens)
        delivered = _delivered(turn)
        await gateway.record.turn(job.replayed, job.step, index, delivered, usage, job.facts.signatures[index])
        yield ChoiceEnd(index, delivered, usage)

    def _facts(self, fields: Sequence[JSONObject], bodies: Sequence[JSONObject]) -> JSONObject:
        """For the ledger: with the request as received they make the same bodies again (`upstream.again`)."""
        digests = [body_digest(json_bytes(body)) for body in bodies]
        return {"profile": self.profile.name, "model": self._model, "fields": list(fields), "digests": digests}


async def _next(chunks: AsyncGenerator[JSONObject, None], reader: TurnReader) -> JSONObject | None:
    """The next object of the stream; None at its end. What is wrong after the finish reason has lost nothing."""
    try:
        if not reader.finished:
            return await anext(chunks, None)
        with anyio.move_on_after(AFTER_FINISH_S):
            return await anext(chunks, None)
        return None
    except UpstreamError:
        if reader.finished:
            return None
        raise


def api_error(error: UpstreamError) -> ApiError:
    """What a client is told."""
    return ApiError(
        error.status,
        error.message,
        code=error.code,
        param=error.param,
        type="rate_limit_error" if error.status == 429 else _kind(error.status),
        headers=None if error.retry_after is None else {"retry-after": error.retry_after},
    )


def _kind(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"


def _delivered(turn: ReceivedTurn) -> Delivered:
    finish: FinishReason = "length" if turn.finish == "length" else "tool_calls" if turn.message.tool_calls else "stop"
    return Delivered(
        message=turn.message,
        finish_reason=finish,
        completion_tokens=turn.counts.completion_tokens,
        reasoning_tokens=turn.counts.reasoning_tokens,
        incomplete_calls=tuple(IncompleteCall(*call) for call in turn.incomplete),
        warnings=turn.warnings,
        ids=() if turn.whole else None,
        output_ids=(),
        stop=turn.stop,
    )


def _budget(options: ChatOptions, settings: GatewaySettings, prompt: MessagePrompt) -> int | None:
    """The client's limit, clamped to the window where the prompt was counted; else at most the whole window."""
    if prompt.counted is not None:
        room = output_budget(options, settings, prompt.counted)
        return None if options.output_budget is None else room
    return None if options.output_budget is None else min(options.output_budget, settings.context_len)


def _key(settings: GatewaySettings) -> str | None:
    """The key of the server. Raises SettingsError when it is not where the settings say."""
    if settings.upstream_key_env is not None:
        key = os.environ.get(settings.upstream_key_env, "").strip()
        if not key:
            raise SettingsError(f"upstream_key_env names {settings.upstream_key_env}, which is not set")
    elif settings.upstream_key_file is not None:
        try:
            key = settings.upstream_key_file.read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise SettingsError(f"cannot read upstream_key_file {settings.upstream_key_file}: {error}") from error
        if not key:
            raise SettingsError(f"upstream_key_file {settings.upstream_key_file} is empty")
    else:
        return None
    if not (key.isascii() and key.isprintable()):
        raise SettingsError("the upstream's key has characters that no header can carry")
    return key
