"""Runs the choices of a completion on the engine and hands over what they produce, in order per choice."""

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from agent_runtime.errors import EngineError, EngineProtocolError
from agent_runtime.gateway.choice import Choice, Delivered
from agent_runtime.gateway.completion import Began, ChoiceEnd, Failure, Item, NewDelta, Usage
from agent_runtime.gateway.errors import ApiError, from_engine, internal_error
from agent_runtime.gateway.job import Gateway, Job
from k3_sglang.chat.contract import contract_problems

logger = logging.getLogger(__name__)


async def run_choices(gateway: Gateway, job: Job, out: MemoryObjectSendStream[Item]) -> None:
    """Run all choices at once, waiting whenever ``out`` is full; closes ``out``. Cancel it to abort them."""
    try:
        async with out, anyio.create_task_group() as tasks:
            for index in range(job.n):
                tasks.start_soon(_run_choice, gateway, job, index, out)
    finally:
        gateway.record.ended(job.step)


async def _run_choice(gateway: Gateway, job: Job, index: int, out: MemoryObjectSendStream[Item]) -> None:
    try:
        made = _items if gateway.foreign is None else gateway.foreign.items
        async with aclosing(made(gateway, job, index)) as items:
            async for item in items:
                if isinstance(item, Began):
                    gateway.record.began(job.step, item.cached_tokens)
                await out.send(item)
    except ApiError as error:
        logger.warning("completion %s choice %d: %s", job.facts.token, index, error)
        await out.send(Failure(error))
    except EngineError as error:
        logger.warning("completion %s choice %d: %s", job.facts.token, index, error)
        await out.send(Failure(from_engine(error)))
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # the reader has gone, and is cancelling this task
    except Exception:
        logger.exception("completion %s choice %d failed", job.facts.token, index)
        await out.send(Failure(internal_error()))


async def _items(gateway: Gateway, job: Job, index: int) -> AsyncGenerator[Item, None]:
    prompt = job.replayed.prompt
    options = job.options
    choice = Choice(gateway.tokenizer, prompt.start, calls_allowed=job.request.tools_callable, stops=options.stops)
    rid = job.rids[index]
    began = False
    finish, cached_tokens = None, 0
    cache: Mapping[str, Any] = {}
    async with aclosing(gateway.engine.stream(prompt.ids, job.sampling[index], rid, job.replayed.images)) as chunks:
        async for chunk in chunks:
            cached_tokens, cache = chunk.cached_tokens, chunk.cache or cache
            finish = chunk.finish
            if not began:
                began = True
                yield Began(index, cached_tokens)
            try:
                deltas = choice.feed(chunk.ids)
            except ValueError as error:
                raise EngineProtocolError(str(error), rid) from error
            for delta in deltas:
                yield NewDelta(index, delta)
            if finish is None and choice.stopped:
                break
    if not began:
        yield Began(index, cached_tokens)
    deltas, delivered = choice.finish(finish)
    for delta in deltas:
        yield NewDelta(index, delta)
    usage = Usage(
        job.replayed.prompt_tokens, cached_tokens, delivered.completion_tokens, delivered.reasoning_tokens, cache
    )
    await gateway.record.turn(job.replayed, job.step, index, delivered, usage, job.facts.signatures[index])
    if job.facts.loosened and delivered.finish_reason != "length":
        # On a thread: it can take seconds, which every other stream would wait.
        problems = await anyio.to_thread.run_sync(_schema_problems, job, delivered)
        delivered = replace(delivered, schema_problems=problems)
    yield ChoiceEnd(index, delivered, usage)


def _schema_problems(job: Job, delivered: Delivered) -> tuple[str, ...]:
    content = delivered.message.content
    return contract_problems(job.request, content if isinstance(content, str) else "", delivered.message.tool_calls)
