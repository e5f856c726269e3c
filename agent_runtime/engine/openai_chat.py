"""Client of any OpenAI-shaped K3 endpoint: streams one chat completion, returns one complete turn."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

import httpx
import openai
from openai.pagination import AsyncPage
from openai.types import Model
from openai.types.chat import ChatCompletionChunk

from agent_runtime.conversation import AssistantTurn, Delta, Message, to_wire
from agent_runtime.engine.chat_errors import (
    ChatProtocolError,
    EndpointUnreachable,
    StreamBroken,
    from_openai,
)
from agent_runtime.engine.turn_builder import TurnBuilder
from agent_runtime.model import CallOptions

_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)

SESSION_HEADER: Final = "x-k3-session"
_HINT_TIMEOUT_S: Final = 5.0
# Below the few seconds after which servers close idle connections, so that none is reused at that very
# moment.
_KEEPALIVE_S: Final = 2.0


def _ignore(_: Delta) -> None:
    return


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What every request of a session carries. Fixed: a change can move the start of the prompt."""

    model: str | None = None
    """Served model; None asks the endpoint and takes the first it lists."""
    max_output_tokens: int | None = None
    """Output limit of one answer; None leaves it to the endpoint."""
    temperature: float | None = None
    top_p: float | None = None
    reasoning_effort: Literal["low", "high", "max"] | None = None
    """None leaves the model's default, which is the one it was trained for most."""


@dataclass(frozen=True, slots=True)
class ChatTimeouts:
    """Limits in seconds, and how often a connection is tried."""

    connect_s: float = 5.0
    idle_s: float = 600.0
    """Silence in a stream after which it counts as broken; long arguments may take minutes to arrive."""
    after_finish_s: float = 10.0
    """Silence after the finish reason; the answer is complete by then, only the usage may still come."""
    connect_tries: int = 3
    backoff_s: float = 0.2
    """Pause before the second try; doubled for each further one."""


class ChatClient:
    """Speaks `/v1/chat/completions`. Use as an async context manager, or call `close`.

    Only a connection that cannot be made is tried again. A request that reached the endpoint is never
    repeated: it may have been worked on, and its pieces have been reported.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "none",
        settings: ChatSettings | None = None,
        timeouts: ChatTimeouts | None = None,
    ) -> None:
        self.base_url = base_url
        self._settings = settings or ChatSettings()
        self._timeouts = timeouts or ChatTimeouts()
        self._model = self._settings.model
        # The read timeout is the idle limit: it counts bytes, so a server's keep-alive comments hold the
        # line.
        timeout = httpx.Timeout(self._timeouts.idle_s, connect=self._timeouts.connect_s)
        http = openai.DefaultAsyncHttpxClient(timeout=timeout, limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_S))
        self._client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0, timeout=timeout, http_client=http
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def models(self) -> list[str]:
        """Names of the served models.

        Raises:
            ChatError: see `complete`.
        """

        async def send() -> AsyncPage[Model]:
            return await self._client.models.list()

        page = await self._connected(send)
        return [model.id for model in page.data]

    async def abandon(self, session: str, from_tokens: int) -> bool:
        """Tell the endpoint's cache that a session will hardly go on behind a position, as after a compression.

        Our gateway before our cache listens; with any other endpoint nothing happens. Returns whether it did.
        """
        body = {"session": f"session:{session}", "from": from_tokens}
        try:
            await self._client.post(
                "/k3/cache/abandon", body=body, cast_to=object, options={"timeout": _HINT_TIMEOUT_S}
            )
        except openai.OpenAIError as error:
            logger.debug("%s takes no hint about its cache: %s", self.base_url, error)
            return False
        return True

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        options: CallOptions | None = None,
        on_delta: Callable[[Delta], None] = _ignore,
    ) -> AssistantTurn:
        """Request one answer and gather it; cancelling closes the stream, which stops the generation.

        Args:
            messages: the whole history; not modified.
            tools: declarations as `ToolRegistry.schemas()` makes them.
            options: what is particular to this call.
            on_delta: told every piece of the answer as it arrives.

        Raises:
            EndpointUnreachable: no connection after `connect_tries` tries.
            RequestRefused, ContextOverflow: the endpoint answered 4xx.
            EndpointFailed: the endpoint answered 5xx.
            StreamBroken: the stream ended, failed or fell silent before the answer was complete.
            ChatProtocolError: the answer does not follow the API.
        """
        request = await self._request(messages, tools, options or CallOptions())
        builder = TurnBuilder(on_delta)
        started = time.monotonic()

        async def send() -> openai.AsyncStream[ChatCompletionChunk]:
            nonlocal started
            started = time.monotonic()
            builder.started = started
            return await self._client.chat.completions.create(**request, stream=True)

        async with await self._connected(send) as stream:
            await self._gather(stream, builder)
        return builder.turn(time.monotonic() - started)

    async def window(self) -> int | None:
        """Context length of the model in tokens as the endpoint lists it; None when it does not say.

        Raises:
            ChatError: see `complete`.
        """

        async def send() -> AsyncPage[Model]:
            return await self._client.models.list()

        name = await self._resolved_model()
        for model in (await self._connected(send)).data:
            if model.id == name:
                extra: dict[str, Any] = model.model_extra or {}
                said = (extra.get("context_length"), extra.get("max_model_len"))
                return next((value for value in said if isinstance(value, int)), None)
        return None

    async def _request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: CallOptions
    ) -> dict[str, Any]:
        chosen = self._settings
        limits = [n for n in (chosen.max_output_tokens, options.max_output_tokens) if n is not None]
        optional = {
            "max_completion_tokens": min(limits, default=None),
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "reasoning_effort": chosen.reasoning_effort,
            "tools": list(tools) or None,
            "tool_choice": options.tool_choice,
            "response_format": options.response_format,
            "extra_headers": {SESSION_HEADER: quote(options.session)} if options.session else None,
        }
        return {
            "model": await self._resolved_model(),
            "messages": [to_wire(message) for message in messages],
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
        }

    async def _resolved_model(self) -> str:
        if self._model is None:
            served = await self.models()
            if not served:
                raise ChatProtocolError(f"{self.base_url} lists no model; name one in ChatSettings.model")
            self._model = served[0]
        return self._model

    async def _connected(self, send: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Await `send()`, trying again while no connection can be made."""
        limits = self._timeouts
        tried = 0
        while True:
            tried += 1
            try:
                return await send()
            except openai.APIConnectionError as error:
                if not isinstance(error.__cause__, (httpx.ConnectError, httpx.ConnectTimeout)):
                    reason = error.__cause__ or error
                    raise StreamBroken(f"{self.base_url}: lost before an answer came: {reason!r}") from error
                if tried >= limits.connect_tries:
                    raise EndpointUnreachable(self.base_url, tried, str(error.__cause__)) from error
                await asyncio.sleep(limits.backoff_s * 2 ** (tried - 1))
            except openai.OpenAIError as error:
                raise from_openai(error, self.base_url) from error

    async def _gather(self, stream: openai.AsyncStream[ChatCompletionChunk], builder: TurnBuilder) -> None:
        """Feed the stream to `builder`. After the finish reason, a stream that breaks off has lost
        nothing."""
        chunks = aiter(stream)
        try:
            while True:
                async with asyncio.timeout(self._timeouts.after_finish_s if builder.finished else None):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                builder.add(chunk)
        except (TimeoutError, httpx.HTTPError, openai.APIError) as error:
            if not builder.finished:
                raise StreamBroken(f"{self.base_url}: {self._broken(error)}", builder.partial()) from error
        except ValueError as error:
            raise ChatProtocolError(f"{self.base_url}: a piece of the answer is not valid: {error}") from error
        if not builder.finished:
            raise StreamBroken(f"{self.base_url}: the stream ended in the middle of an answer", builder.partial())

    def _broken(self, error: Exception) -> str:
        if isinstance(error, (httpx.ReadTimeout, openai.APITimeoutError)):
            return f"no data for {self._timeouts.idle_s:g} s"
        return f"the stream failed: {error!r}"
