"""Call a sync or async function from the event loop; one that hangs cannot hold up the program's exit."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any


async def call_function(function: Callable[..., Any], arguments: Mapping[str, Any], *, positional: bool = False) -> Any:
    """Await an async function, or run a sync one in its own daemon thread.

    The default executor is no place for tools: closing the event loop waits for its threads, and a function
    that never returns would then keep the process from ending. Raises whatever the function raises. With `positional`
    the values are passed in their order, whatever the function calls its parameters.
    """
    args = tuple(arguments.values()) if positional else ()
    kwargs: Mapping[str, Any] = {} if positional else arguments
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function, *args, **kwargs)
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            # The caller gave up on this call and closed its loop: nobody is left to tell.
            if not loop.is_closed():
                raise

    threading.Thread(target=work, name=f"tool-{getattr(function, '__name__', 'call')}", daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value
