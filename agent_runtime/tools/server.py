"""An agent behind HTTP: `AgentServer(endpoint, registry).start(port)`."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agent_runtime.compression.count import ContextMeter, UsageMeter
from agent_runtime.conversation import ConversationError
from agent_runtime.engine.chat_errors import ChatError
from agent_runtime.engine.openai_chat import ChatClient, ChatSettings
from agent_runtime.errors import AgentBusy, AgentRuntimeError
from agent_runtime.eventjson import event_json, result_json
from agent_runtime.events import RunFinished
from agent_runtime.limits import Limits
from agent_runtime.loop import Agent, AgentOptions
from agent_runtime.tools.registry import ToolRegistry


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What every session of a server has."""

    system: str | None = None
    limits: Limits = field(default_factory=Limits)
    agent: AgentOptions = field(default_factory=AgentOptions)
    chat: ChatSettings = field(default_factory=ChatSettings)
    api_key: str = "none"
    meter: Callable[[], ContextMeter] = UsageMeter
    """Makes what counts a session's tokens."""
    max_sessions: int = 1000
    """Sessions in memory; the one unused for longest goes first."""


class AgentServer:
    """Serves agents that share one endpoint and one set of tools. Sessions are kept in memory.

    | path | answer |
    |---|---|
    | `POST /run` `{"task", "session"?, "stream"?}` | the run's result; with `stream` its events as server-sent events |
    | `GET /tools` | the declarations |
    | `GET /health` | 200 while the server runs |

    It has no authentication: whoever can reach the port can run the tools. It listens on loopback unless told.
    """

    def __init__(self, endpoint: str, registry: ToolRegistry, options: ServerOptions | None = None) -> None:
        """`endpoint` is the base URL of an OpenAI-shaped K3 server, for example `http://127.0.0.1:30000/v1`."""
        self._endpoint = endpoint
        self._registry = registry
        self._options = options or ServerOptions()
        self._sessions: dict[str, Agent] = {}
        self._client: ChatClient | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port: int | None = None
        """The port it listens on, once started."""

    def start(
        self,
        port: int = 8000,
        *,
        host: str = "127.0.0.1",
        block: bool = True,
        on_listening: Callable[[int], None] = lambda _: None,
    ) -> AgentServer:
        """Serve until Ctrl-C, or in a thread with `block=False` until `stop`. Port 0 takes a free one.

        `on_listening` is told the port as soon as connections are accepted.

        Raises:
            OSError: the port is taken.
        """
        listener = socket.create_server((host, port))
        taken: int = listener.getsockname()[1]
        self.port = taken
        on_listening(taken)
        config = uvicorn.Config(self.app(), log_level="warning", lifespan="on", ws="none", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        if block:
            self._server.run(sockets=[listener])
            listener.close()
            return self
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="agent-server", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """End a server that was started with `block=False`, and its runs."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()

    def app(self) -> Starlette:
        """The application, for any ASGI server."""
        return Starlette(
            routes=[
                Route("/run", self._run, methods=["POST"]),
                Route("/tools", self._tools, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            lifespan=lambda _: _lifespan(self),
        )

    async def _run(self, request: Request) -> Response:
        try:
            task, session, stream = _read(await request.body())
            agent = self._agent(session)
            agent.check_task(task)
        except (ValueError, ConversationError) as error:
            return _error(400, str(error))
        except AgentBusy as error:
            return _error(409, str(error))
        if stream:
            return _EventStream(self._events(agent, task, session), media_type="text/event-stream")
        try:
            return JSONResponse({"session": session, **result_json(await agent.run(task))})
        except ChatError as error:
            return _error(502, str(error))

    async def _events(self, agent: Agent, task: str, session: str) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(agent.run_stream(task)) as events:
                async for event in events:
                    body = event_json(event)
                    if isinstance(event, RunFinished):
                        body["session"] = session
                    yield _sse(body)
        except AgentRuntimeError as error:
            yield _sse({"event": "error", "message": str(error)})

    async def _tools(self, request: Request) -> Response:
        return JSONResponse({"tools": self._registry.schemas()})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "sessions": len(self._sessions)})

    def _agent(self, session: str) -> Agent:
        """The session's agent, made when it is new.

        Raises:
            AgentBusy: the session is in the middle of a run.
        """
        agent = self._sessions.pop(session, None)
        if agent is None:
            agent = Agent(
                self._chat(),
                self._registry,
                self._options.system,
                limits=self._options.limits,
                options=self._options.agent,
                meter=self._options.meter(),
            )
        self._sessions[session] = agent
        if agent.running:
            raise AgentBusy(f"session {session!r} is running; a conversation has one turn at a time")
        for name in [name for name, old in self._sessions.items() if not old.running and name != session]:
            if len(self._sessions) <= self._options.max_sessions:
                break
            del self._sessions[name]
        return agent

    def _chat(self) -> ChatClient:
        if self._client is None:
            self._client = ChatClient(self._endpoint, api_key=self._options.api_key, settings=self._options.chat)
        return self._client

    async def aclose(self) -> None:
        """Close the connections to the endpoint."""
        if self._client is not None:
            await self._client.close()
            self._client = None


class _EventStream(StreamingResponse):
    """Ends its events when the client leaves, also while there are none to send."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:

            async def stream() -> None:
                with suppress(OSError):  # the client left while something was sent
                    await self.stream_response(send)
                group.cancel_scope.cancel()

            group.start_soon(stream)
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()


class _lifespan:
    """Closes what the application opened."""

    def __init__(self, server: AgentServer) -> None:
        self._server = server

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        await self._server.aclose()


def _read(raw: bytes) -> tuple[str, str, bool]:
    """Task, session and whether to stream. Raises ValueError for anything else."""
    try:
        body: Any = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body must be an object with a task")
    values = cast("dict[str, Any]", body)
    unknown = sorted(set(values) - {"task", "session", "stream"})
    if unknown:
        raise ValueError(f"unknown fields {unknown}; allowed: task, session, stream")
    task, session, stream = values.get("task"), values.get("session", uuid.uuid4().hex), values.get("stream", False)
    if not isinstance(task, str) or not isinstance(session, str) or not isinstance(stream, bool) or not session:
        raise ValueError("task and session are texts, stream is true or false; task is required")
    return task, session, stream


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)


def _sse(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
