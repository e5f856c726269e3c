"""Measures one completion: when its first token came, how it ended, and its tokens; for the log and for the metrics."""

import time
from types import TracebackType
from typing import Self

from agent_runtime.gateway.completion import Began, ChoiceEnd, Failure, Item, Usage, WireForm
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.operations.instruments import Instruments

DONE = "done"
CLIENT_LEFT = "client_left"
ERROR = "error"
ERROR_IN_STREAM = "error_in_stream"


class Meter:
    """A context around the time a completion is at the engine. Costs nothing for tokens between the first and the last.

    ``outcome`` is set by whoever serves it; a completion that nobody ended was left by its client. ``began_s`` is the
    monotonic time of the request's arrival.
    """

    def __init__(self, instruments: Instruments | None, protocol: WireForm, began_s: float | None = None) -> None:
        self._instruments = instruments
        self._protocol: WireForm = protocol
        self._first_s: float | None = None
        self._ended_s: float | None = None
        self._prompt: tuple[int, int] | None = None
        self.began_s = time.monotonic() if began_s is None else began_s
        self.ends: dict[int, ChoiceEnd] = {}
        self.outcome = CLIENT_LEFT
        self.status: int | None = None
        """Of the failure, if it failed."""

    def __enter__(self) -> Self:
        if self._instruments is not None:
            self._instruments.running.labels(self._protocol).inc()
            self._instruments.waiting.labels(self._protocol).inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended_s = time.monotonic()
        if isinstance(error, Exception) and self.outcome == CLIENT_LEFT:  # a fault, not a client that left
            self.outcome, self.status = ERROR, 500
        instruments = self._instruments
        if instruments is None:
            return
        instruments.running.labels(self._protocol).dec()
        if self._first_s is None:
            instruments.waiting.labels(self._protocol).dec()
        instruments.total.labels(self._protocol).observe(self._ended_s - self.began_s)
        instruments.completions.labels(self._protocol, self.outcome).inc()

    def item(self, item: Item, prompt_tokens: int) -> None:
        """Something of the completion arrived; called for each, in order."""
        if isinstance(item, ChoiceEnd):
            self.ends[item.index] = item
            self.ended(item.usage, item.delivered.finish_reason, counts_prompt=len(self.ends) == 1)
        elif self._first_s is None and not isinstance(item, Failure):
            self.first_token()
            if isinstance(item, Began):
                self._prompt_seen(prompt_tokens, item.cached_tokens)

    def first_token(self) -> None:
        """The engine has begun to write."""
        if self._first_s is not None:
            return
        self._first_s = time.monotonic()
        if self._instruments is not None:
            self._instruments.waiting.labels(self._protocol).dec()
            self._instruments.first_token.labels(self._protocol).observe(self._first_s - self.began_s)

    def ended(self, usage: Usage, finish_reason: str, *, counts_prompt: bool = True) -> None:
        """One choice is over."""
        self.first_token()
        if counts_prompt:
            self._prompt_seen(usage.prompt_tokens, usage.cached_tokens)
        if self._instruments is not None:
            self._instruments.output_tokens.labels(self._protocol).inc(usage.completion_tokens)
            self._instruments.reasoning_tokens.labels(self._protocol).inc(usage.reasoning_tokens)
            self._instruments.finishes.labels(self._protocol, finish_reason).inc()

    def _prompt_seen(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the prompt. Another server tells its counts at the end only: what is more by then is added."""
        before = self._prompt or (0, 0)
        self._prompt = max(before[0], prompt_tokens), max(before[1], cached_tokens)
        if self._instruments is not None:
            self._instruments.prompt_tokens.labels(self._protocol).inc(self._prompt[0] - before[0])
            self._instruments.cached_tokens.labels(self._protocol).inc(self._prompt[1] - before[1])

    def failed(self, error: ApiError, *, in_stream: bool) -> None:
        """It failed. Of answers that had not begun, whoever counts answers counts the error."""
        self.outcome = ERROR_IN_STREAM if in_stream else ERROR
        self.status = error.status
        if in_stream and self._instruments is not None:
            self._instruments.error(self._protocol, error.word)

    @property
    def first_ms(self) -> float:
        """Milliseconds until the first token; those so far when there was none."""
        return 1000 * ((self._first_s or self._ended_s or time.monotonic()) - self.began_s)

    @property
    def total_ms(self) -> float:
        """Milliseconds from the request's arrival to the end."""
        return 1000 * ((self._ended_s or time.monotonic()) - self.began_s)
