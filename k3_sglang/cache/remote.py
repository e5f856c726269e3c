"""How an HTTP route of the engine asks the schedulers about their cache: one command, run by every rank.

The front process sends SGLang's control message for its dumper, which is broadcast as requests are, under method names
that only we use. All ranks that share one waiting queue run the command at the same point of the request stream, so a
command that changes the cache keeps them equal.

A command is a function ``(states, body) -> answer`` registered with :func:`command`; ``states`` is the scheduler's
:class:`~k3_sglang.cache.component.CheckpointComponent`, ``body`` and the answer are JSON objects. Modules with commands
are imported by :mod:`k3_sglang.plugin`, so that every process knows them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from k3_sglang import compat
from k3_sglang.cache.scheduling import states_of

logger = logging.getLogger(__name__)

PATH = "/k3/cache"
"""Commands are routes below this path of the engine's HTTP server."""

METHOD_PREFIX = "k3_cache/"
"""Tells our messages from those of SGLang's dumper."""


class CommandError(ValueError):
    """A command that cannot be carried out as asked; the message says why and what is allowed."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


Run = Callable[[Any, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """One command as its route and the schedulers see it."""

    run: Run
    changes: bool
    """POST; otherwise GET, with the query as the body."""
    every_rank: bool
    """Answers of all ranks are wanted; otherwise of one for each waiting queue."""


COMMANDS: dict[str, Command] = {}
"""By name, which is the last part of the route."""


def command(name: str, *, changes: bool = False, every_rank: bool = False) -> Callable[[Run], Run]:
    """Register the decorated function under a name.

    Raises:
        ValueError: the name is taken.
    """

    def register(run: Run) -> Run:
        if name in COMMANDS:
            raise ValueError(f"there is a cache command {name!r} already; choose another name")
        COMMANDS[name] = Command(run, changes, every_rank)
        return run

    return register


# --- scheduler --------------------------------------------------------------------------------------------------------


def handle(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around ``Scheduler.handle_dumper_control``: run ours here, leave the others to it."""
    if not request.method.startswith(METHOD_PREFIX):
        return original(scheduler, request)
    known = COMMANDS[request.method.removeprefix(METHOD_PREFIX)]
    answer = run_here(known, scheduler.tree_cache, request.body)
    answers = [answer]
    if known.every_rank:
        answers = _gathered(answer)
    return compat.DumperControlReqOutput(success=True, response=answers)


def run_here(known: Command, tree_cache: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Run a command on this rank; a failure is an answer too, since other ranks and the route wait for one."""
    parallel = compat.get_parallel()
    place = {"dp_rank": int(parallel.attn_dp_rank), "tp_rank": int(parallel.attn_tp_rank)}
    states = states_of(tree_cache)
    try:
        if states is None:
            raise CommandError("this engine runs another cache; start it with cache: k3", HTTPStatus.CONFLICT)
        return {**place, **known.run(states, body)}
    except CommandError as error:
        return {**place, "error": str(error), "status": int(error.status)}
    except Exception as error:
        logger.exception("a cache command failed")
        return {**place, "error": repr(error), "status": int(HTTPStatus.INTERNAL_SERVER_ERROR)}


def _gathered(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of all ranks that share this one's waiting queue, by rank."""
    import torch.distributed

    group = compat.get_parallel().attn_tp_group
    if group is None or group.world_size == 1:
        return [answer]
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, answer, group=group.cpu_group)
    return answers


# --- front process ----------------------------------------------------------------------------------------------------


async def ask(name: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run a command on the schedulers.

    Returns:
        One answer for each rank asked, each with its ``dp_rank`` and ``tp_rank``.

    Raises:
        CommandError: a rank could not carry it out.
    """
    manager = compat.http_server_state.tokenizer_manager
    outputs = await manager.dumper_control(
        compat.DumperControlReqInput(method=METHOD_PREFIX + name, body=dict(body)),
    )
    answers = [answer for output in outputs for answer in output.response]
    for answer in answers:
        if "error" in answer:
            raise CommandError(answer["error"], HTTPStatus(answer["status"]))
    return answers


def add_routes(*args: Any, **kwargs: Any) -> None:
    """Before the HTTP server starts: one route for every command."""
    app = compat.http_app
    for name, known in COMMANDS.items():
        app.add_api_route(f"{PATH}/{name}", _endpoint(name), methods=["POST" if known.changes else "GET"])


def _endpoint(name: str) -> Callable[..., Any]:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def endpoint(request: Request) -> JSONResponse:
        try:
            answers = await ask(name, await _body(request))
        except CommandError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=error.status)
        return JSONResponse({"ranks": answers})

    endpoint.__annotations__ = {"request": Request}  # names of this function are unknown to FastAPI
    return compat.auth_level(compat.AuthLevel.ADMIN_OPTIONAL)(endpoint)


async def _body(request: Any) -> dict[str, Any]:
    if request.method == "GET":
        return dict(request.query_params)
    try:
        body = await request.json()
    except ValueError as error:
        raise CommandError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CommandError(f"the body is {body!r}; it must be a JSON object")
    return body
