"""Tools as typed Python functions: `@tool`, the registry, and execution that never raises into the loop."""

from __future__ import annotations

import asyncio
import difflib
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, overload
from weakref import WeakKeyDictionary

from pydantic_core import PydanticSerializationError, to_json

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.approval import DEFAULT_APPROVAL_TIMEOUT_S, ApprovalRequest, Approve, ask
from agent_runtime.tools.result import Failure, ToolError, ToolResult
from agent_runtime.tools.signature import JsonSchema, ToolDefinitionError, ToolSignature, read_signature
from agent_runtime.tools.threads import call_function

__all__ = ["Tool", "ToolDefinitionError", "ToolError", "ToolRegistry", "ToolResult", "tool"]

DEFAULT_TIMEOUT_S: Final = 60.0
DEFAULT_MAX_PARALLEL: Final = 8
DEFAULT_MAX_RESULT_BYTES: Final = 64 * 1024

OnStart = Callable[[int], None]
OnResult = Callable[[int, ToolResult], None]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. Calling the tool calls the function."""

    function: Callable[..., Any]
    signature: ToolSignature
    timeout_s: float
    """Seconds until the call is given up. A synchronous function runs in a thread, which Python cannot stop:
    its result is discarded, its side effects are not."""
    parallel: bool
    """Whether the tool may run beside other calls of the same turn. False for tools that change things:
    those run alone and in the order the model wrote them."""
    max_parallel: int | None = None
    """How many of its calls may run at a time, over all agents that share the registry; None for any number."""

    def __post_init__(self) -> None:
        if self.max_parallel is not None and self.max_parallel < 1:
            raise ToolDefinitionError(f"tool {self.name!r}: max_parallel={self.max_parallel}, must be at least 1")

    @property
    def name(self) -> str:
        """The name the model calls."""
        return self.signature.name

    @property
    def schema(self) -> JsonSchema:
        """The declaration as it goes into a request."""
        function = {
            "name": self.name,
            "description": self.signature.description,
            "parameters": self.signature.parameters,
        }
        return {"type": "function", "function": function}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    parallel: bool = True,
    max_parallel: int | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    parallel: bool = True,
    max_parallel: int | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a typed function, sync or async; as `@tool` or `@tool(timeout_s=5, parallel=False)`.

    The function returns text, a `ToolResult`, or any value pydantic can write as JSON. It raises `ToolError`
    to tell the model that it cannot do what was asked.

    Raises:
        ToolDefinitionError: see `read_signature`; also when `timeout_s` is not positive.
    """

    def make(function: Callable[..., Any]) -> Tool:
        signature = read_signature(function, name=name, description=description)
        if timeout_s <= 0:
            raise ToolDefinitionError(f"tool {signature.name!r}: timeout_s={timeout_s}, must be positive")
        return Tool(function, signature, timeout_s, parallel, max_parallel)

    return make if function is None else make(function)


class ToolRegistry:
    """The tools of one agent, and the only place where calls are executed.

    With `approve`, every call is shown to it after its arguments were checked and before it runs; only a clear yes
    runs it (see `approval.ask`).
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        max_parallel: int = DEFAULT_MAX_PARALLEL,
        max_result_bytes: int = DEFAULT_MAX_RESULT_BYTES,
        approve: Approve | None = None,
        approval_timeout_s: float = DEFAULT_APPROVAL_TIMEOUT_S,
    ) -> None:
        if max_parallel < 1:
            raise ValueError(f"max_parallel={max_parallel}, must be at least 1")
        self._approve = approve
        self._approval_timeout_s = approval_timeout_s
        # A semaphore belongs to the event loop it is first waited on.
        self._busy: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()
        self._tools: dict[str, Tool] = {}
        self._max_parallel = max_parallel
        self._max_result_bytes = max_result_bytes
        for item in tools:
            self.add(item)

    def add(self, item: Tool | Callable[..., Any]) -> Tool:
        """Add a tool, or a typed function as one.

        Raises:
            ToolDefinitionError: the function cannot be a tool, or the name is taken.
        """
        made = item if isinstance(item, Tool) else tool(item)
        if made.name in self._tools:
            raise ToolDefinitionError(f"tool name {made.name!r} is already registered; choose another name")
        self._tools[made.name] = made
        return made

    def approve_with(self, approve: Approve) -> None:
        """Ask this hook from now on, in the place of the one before."""
        self._approve = approve

    def register(
        self,
        name: str | None = None,
        description: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        parallel: bool = True,
        max_parallel: int | None = None,
    ) -> Callable[[Callable[..., Any]], Tool]:
        """Decorator that makes a tool and adds it: `@registry.register("add", "Adds two numbers.")`."""
        make = tool(
            name=name, description=description, timeout_s=timeout_s, parallel=parallel, max_parallel=max_parallel
        )
        return lambda function: self.add(make(function))

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._tools))

    def get(self, name: str) -> Tool | None:
        """The tool of that name, or None."""
        return self._tools.get(name)

    def schemas(self) -> list[JsonSchema]:
        """Declarations for a request, sorted by name.

        They open the prompt, so their bytes must not depend on the order of registration.
        """
        return [self._tools[name].schema for name in self.names]

    def check(self, call: ToolCall) -> ToolResult | None:
        """What would keep the call from being run, without running it; None when nothing would."""
        found = self._tools.get(call.name)
        if found is None:
            return self._unknown(call.name)
        arguments = found.signature.check(call.arguments)
        return arguments if isinstance(arguments, ToolResult) else None

    async def execute(self, call: ToolCall, *, on_start: Callable[[], None] = lambda: None) -> ToolResult:
        """Check and run one call. Every failure is a result; only the caller's own cancellation is raised.

        `on_start` is called when the call has been checked and approved, right before its function is.
        """
        found = self._tools.get(call.name)
        if found is None:
            return self._unknown(call.name)
        arguments = found.signature.check(call.arguments)
        if isinstance(arguments, ToolResult):
            return arguments
        if self._approve is not None:
            denied = await ask(self._approve, ApprovalRequest(call.name, arguments), self._approval_timeout_s)
            if denied is not None:
                return denied
        async with self._slot(found):
            on_start()
            result = await _run(found, arguments)
        return result.capped(self._max_result_bytes)

    def _slot(self, found: Tool) -> AbstractAsyncContextManager[None]:
        if found.max_parallel is None:
            return nullcontext()
        mine = self._busy.setdefault(asyncio.get_running_loop(), {})
        return mine.setdefault(found.name, asyncio.Semaphore(found.max_parallel))

    async def execute_all(
        self,
        calls: Sequence[ToolCall],
        *,
        on_start: OnStart = lambda _: None,
        on_result: OnResult = lambda _, __: None,
    ) -> list[ToolResult]:
        """Run the calls of one turn; results are in the order of the calls.

        Neighbouring calls of parallel tools run together, at most `max_parallel` at a time; a call of any
        other tool runs alone at its place in the order. On cancellation the running calls are cancelled too;
        what was finished by then has already been handed to `on_result`.

        Args:
            calls: the calls as the model wrote them.
            on_start: told a call's position when its function is about to be called.
            on_result: told a call's position and result when it ends.
        """
        results: dict[int, ToolResult] = {}
        slots = asyncio.Semaphore(self._max_parallel)

        async def run_one(position: int) -> None:
            async with slots:
                results[position] = await self.execute(calls[position], on_start=lambda: on_start(position))
                on_result(position, results[position])

        for batch in self._batches(calls):
            async with asyncio.TaskGroup() as group:
                for position in batch:
                    group.create_task(run_one(position))
        return [results[position] for position in range(len(calls))]

    def _batches(self, calls: Sequence[ToolCall]) -> list[list[int]]:
        """Positions that may run together, in order. An unknown tool changes nothing, so it counts as
        parallel."""
        batches: list[list[int]] = []
        open_batch = False
        for position, call in enumerate(calls):
            found = self._tools.get(call.name)
            parallel = found is None or found.parallel
            if parallel and open_batch:
                batches[-1].append(position)
            else:
                batches.append([position])
            open_batch = parallel
        return batches

    def _unknown(self, name: str) -> ToolResult:
        close = difflib.get_close_matches(name, self.names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return ToolResult(
            model=f"There is no tool named {name!r}.{hint} Available tools: {', '.join(self.names)}.",
            user=f"unknown tool {name!r}",
            failure=Failure.UNKNOWN_TOOL,
        )


async def _run(found: Tool, arguments: dict[str, Any]) -> ToolResult:
    timer = asyncio.timeout(found.timeout_s)
    try:
        async with timer:
            value = await call_function(found.function, arguments)
        return _as_result(value)
    except ToolError as error:
        return ToolResult(str(error), error.user or "", error.debug, Failure.REFUSED)
    except TimeoutError as error:
        return _timed_out(found) if timer.expired() else _crashed(found, error)
    except (Exception, SystemExit) as error:
        return _crashed(found, error)
    except asyncio.CancelledError as error:
        # A tool may raise it too, for a task of its own; only a request to cancel this task is the caller's.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _crashed(found, error)


def _as_result(value: object) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    try:
        return ToolResult(to_json(value).decode())
    except PydanticSerializationError as error:
        raise TypeError(f"the tool returned a value that cannot be written as JSON: {error}") from error


def _timed_out(found: Tool) -> ToolResult:
    return ToolResult(
        model=f"{found.name} was stopped after {found.timeout_s:g} s without a result. Ask for less at once.",
        user=f"{found.name}: no result after {found.timeout_s:g} s",
        failure=Failure.TIMEOUT,
    )


def _crashed(found: Tool, error: BaseException) -> ToolResult:
    summary = f"{found.name} failed with {type(error).__name__}: {error}"
    return ToolResult(
        model=summary,
        debug="".join(traceback.format_exception(error)),
        failure=Failure.CRASHED,
    )
