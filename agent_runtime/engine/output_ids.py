"""Turns /generate's events into chunks of new ids, whether the engine sends totals or increments."""

from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any, cast

from agent_runtime.engine.types import Chunk, Finish
from agent_runtime.errors import (
    EngineAborted,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)

DONE = b"[DONE]"
CACHE_FACTS = "k3_cache"
"""Key of ``meta_info`` under which the checkpoint cache tells why a hit was not longer."""
_REJECTED = frozenset({400, 413, 422})


async def server_sent_data(stream: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The payload of each ``data:`` line of a server-sent event stream.

    Lines end at ``\\n`` only: httpx's own line iterator also splits at U+2028 and its kin, which JSON text
    may hold unescaped.
    """
    pending = bytearray()
    searched_len = 0
    async for piece in stream:
        pending += piece
        start = 0
        while (end := pending.find(b"\n", max(start, searched_len))) >= 0:
            line = bytes(pending[start:end])
            start = end + 1
            if line.startswith(b"data:"):
                yield line[5:].strip()
        del pending[:start]
        searched_len = len(pending)


def engine_error(status: int, message: str, rid: str | None) -> EngineError:
    """The typed error for an HTTP-like status the engine answered with."""
    if status in _REJECTED:
        return EngineRejected(message, rid)
    if status == 429 or status >= 500:
        return EngineUnavailable(message, rid)
    return EngineProtocolError(f"the engine answered status {status} to /generate: {message}", rid)


def error_message(body: Any) -> str:
    """The sentence inside an error body; SGLang nests it or not, depending on who refused."""
    if isinstance(body, Mapping):
        fields = cast("Mapping[str, Any]", body)
        for key in ("error", "message", "detail"):
            if fields.get(key):
                return error_message(fields[key])
    return body if isinstance(body, str) else repr(cast("object", body))


class OutputIds:
    """Follows one generation and cuts out what each event adds.

    SGLang sends all ids so far with every event, or, under ``--incremental-streaming-output``, only the new
    ones. ``completion_tokens`` decides which: a total has at least that many ids. Two irregular events are
    legal: a total that already holds ids decoded after its count was taken, and the end of an aborted
    incremental stream, which repeats the last id.
    """

    def __init__(self, rid: str, prompt_len: int) -> None:
        """``prompt_len``: prompt tokens as the engine counts them, images expanded."""
        self._rid = rid
        self._prompt_len = prompt_len
        self._received_tokens = 0
        self._last_id: int | None = None

    def chunk(self, event: Mapping[str, Any]) -> Chunk:
        """The chunk an event stands for. Raises the typed error when the event is one."""
        if event.get("error") is not None:
            raise self._failure(event["error"])
        meta = event.get("meta_info")
        ids = event.get("output_ids")
        if not isinstance(meta, Mapping) or not isinstance(ids, list):
            raise EngineProtocolError(
                f"an event of /generate must hold meta_info and output_ids, got {sorted(event)}", self._rid
            )
        fields = cast("Mapping[str, Any]", meta)
        finish = self._finish(fields.get("finish_reason"))
        new_ids = self._new_ids(cast("list[int]", ids), fields.get("completion_tokens"))
        return Chunk(
            ids=tuple(new_ids),
            prompt_tokens=self._prompt_tokens(fields),
            cached_tokens=self._count(fields, "cached_tokens"),
            completion_tokens=self._received_tokens,
            finish=finish,
            cache=self._cache(fields),
        )

    def _prompt_tokens(self, fields: Mapping[str, Any]) -> int:
        """The prompt's length; an engine that counts another has not read the prompt it was sent."""
        counted = self._count(fields, "prompt_tokens")
        if counted not in (0, self._prompt_len):  # 0: not said
            raise EngineProtocolError(
                f"the engine counts {counted} prompt tokens, the request has {self._prompt_len}", self._rid
            )
        return self._prompt_len

    def _count(self, fields: Mapping[str, Any], key: str) -> int:
        value = fields.get(key)
        if value is not None and not isinstance(value, int):
            raise EngineProtocolError(f"{key} is no integer: {value!r}", self._rid)
        return value or 0

    def _cache(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """A list of one object; later events of an incremental stream have an empty list."""
        told = fields.get(CACHE_FACTS)
        objects = cast("list[Any]", told) if isinstance(told, list) else []
        return cast("Mapping[str, Any]", objects[-1]) if objects and isinstance(objects[-1], Mapping) else {}

    def _new_ids(self, ids: list[int], total_tokens: Any) -> list[int]:
        if not isinstance(total_tokens, int):
            raise EngineProtocolError(f"completion_tokens is no integer: {total_tokens!r}", self._rid)
        received = self._received_tokens
        if len(ids) >= total_tokens:
            if received and (len(ids) < received or ids[received - 1] != self._last_id):
                raise EngineProtocolError(f"output_ids no longer begin with the {received} ids sent before", self._rid)
            new_ids = ids[received:]
        elif received + len(ids) == total_tokens:
            new_ids = ids
        elif received == total_tokens and ids == [self._last_id]:
            new_ids = []
        else:
            raise EngineProtocolError(
                f"{received} ids received and {len(ids)} in this event, but completion_tokens={total_tokens}",
                self._rid,
            )
        odd = next((token for token in new_ids if type(token) is not int or token < 0), None)
        if odd is not None:
            raise EngineProtocolError(f"output_ids holds {odd!r}, which is no token id", self._rid)
        if new_ids:
            self._received_tokens = received + len(new_ids)
            self._last_id = new_ids[-1]
        return new_ids

    def _finish(self, reason: Any) -> Finish | None:
        if reason is None:
            return None
        fields: Mapping[str, Any] = cast("Mapping[str, Any]", reason) if isinstance(reason, Mapping) else {}
        kind = fields.get("type")
        if kind == "stop" or kind == "length":
            return Finish(type=kind, matched=fields.get("matched"))
        if kind != "abort":
            raise EngineProtocolError(f"finish_reason is none of stop, length, abort: {reason!r}", self._rid)
        message = str(fields.get("message") or "the engine aborted the request")
        status = fields.get("status_code")
        if isinstance(status, int):
            raise engine_error(status, message, self._rid)
        raise EngineAborted(message, self._rid)

    def _failure(self, error: Any) -> EngineError:
        code: Any = cast("Mapping[str, Any]", error).get("code") if isinstance(error, Mapping) else None
        return engine_error(code if isinstance(code, int) else 500, error_message(error), self._rid)
