"""The routes under /v1/responses."""

import json
from typing import Any

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_runtime.gateway.admission import slot_of
from agent_runtime.gateway.answer import Answer
from agent_runtime.gateway.body import read_json_object
from agent_runtime.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError
from agent_runtime.gateway.job import INLINE_BODY_BYTES, Asked, Gateway, Job, prepare
from agent_runtime.gateway.owner import owner_of
from agent_runtime.gateway.responses.background import Background
from agent_runtime.gateway.responses.decode import Decoded, decode
from agent_runtime.gateway.responses.encode import without_signatures
from agent_runtime.gateway.responses.fields import ENCRYPTED_REASONING, IMAGE_URLS
from agent_runtime.gateway.responses.listing import page, with_ids
from agent_runtime.gateway.responses.response import Json, new_response
from agent_runtime.gateway.responses.store import ResponseStore, Stored
from agent_runtime.gateway.responses.wire import ResponsesWire
from k3_sglang.chat.request_fields import shown

_PATH = "/v1/responses"


class ResponseRoutes:
    """Creates, shows, lists, cancels and deletes responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        settings = gateway.settings
        responses, size_bytes = (
            max(1, bound // len(gateway.owners))
            for bound in (settings.stored_responses, settings.stored_responses_bytes)
        )
        self._stores = {owner: ResponseStore(responses, size_bytes) for owner in gateway.owners}
        self.background = Background(gateway)
        self._foreground: dict[str, Answer] = {}

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route(_PATH, self.create, methods=["POST"]),
            Route(f"{_PATH}/{{name}}", self.show, methods=["GET"]),
            Route(f"{_PATH}/{{name}}", self.delete, methods=["DELETE"]),
            Route(f"{_PATH}/{{name}}/cancel", self.cancel, methods=["POST"]),
            Route(f"{_PATH}/{{name}}/input_items", self.input_items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""
        try:
            # Finite: the response repeats parts of the request.
            body, received = await read_json_object(request, self._gateway.settings.max_body_bytes, finite=True)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        owner = owner_of(request)
        store = self.store(owner)
        previous = _previous(body, store)
        is_small = previous is None and len(received) <= INLINE_BODY_BYTES
        decoded = decode(body, previous.conversation() if previous is not None else (), store.find_item)
        if decoded.fields.background:
            self.background.check_room(owner)
        try:
            # The record keeps the chat completion that is meant: whole, where the request says only what is new.
            raw = await _written(decoded.chat, is_small=is_small)
            job = await prepare(Asked(decoded.chat, raw, request.headers, owner=owner), self._gateway)
        except ApiError as error:
            raise decoded.blame.error(error) from error
        response = new_response(body, decoded, job.facts, self._gateway.settings)
        items = with_ids(decoded.items, job.facts.token)
        stored = Stored(response, items, previous, job.facts.signatures[0])
        if decoded.fields.stored:
            stored.items_bytes = len(await _written(items, is_small=is_small))
            store.add(stored)
        wire = self._wire(decoded, job, stored, store)
        if not decoded.fields.background:
            return _Foreground(Answer(self._gateway, job, wire), wire, self._foreground)
        self.background.start(job, wire, owner, slot_of(request.scope))
        return JSONResponse(wire.response, headers=job.headers())

    async def show(self, request: Request) -> Response:
        """GET /v1/responses/{id}."""
        stored = self._stored(request)
        include = _include(request)
        for name in request.query_params:
            if name.removesuffix("[]") != "include" and request.query_params[name] not in ("false", ""):
                raise ApiError(
                    400,
                    f"{shown(name)} is not offered: a stored response is shown as one object.",
                    code="unsupported_field",
                    param=name[:64],
                )
        output = stored.output()
        return JSONResponse(
            {**stored.response, "output": output if ENCRYPTED_REASONING in include else without_signatures(output)}
        )

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}; one that runs is aborted."""
        stored = self._stored(request)
        self.store(owner_of(request)).remove(stored)
        self.background.cancel(stored.id)
        if (answer := self._foreground.get(stored.id)) is not None:
            # 410: clients try a 409 or 500 once more by themselves.
            answer.abort(ApiError(410, "The response was deleted while it ran.", code="response_deleted"))
        return JSONResponse({"id": stored.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel; one that is over stays as it is."""
        stored = self._stored(request)
        if not stored.response["background"]:
            raise ApiError(
                400,
                "Only a response that was created with background=true can be cancelled; the client of any other "
                "ends it by closing its connection.",
                code="not_in_background",
            )
        if stored.running:
            self.store(owner_of(request)).update(stored, {**stored.response, "status": "cancelled"})
            self.background.cancel(stored.id)
        return JSONResponse(stored.response)

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: all that the model was given, the instructions aside."""
        stored = self._stored(request)
        items = stored.input()
        if ENCRYPTED_REASONING not in _include(request):
            items = without_signatures(items)
        return JSONResponse(page(items, request.query_params))

    def store(self, owner: str) -> ResponseStore:
        """The kept responses of an owner: nobody else can find, continue or cancel them, or make them go."""
        return self._stores[owner]

    def _wire(self, decoded: Decoded, job: Job, stored: Stored, store: ResponseStore) -> ResponsesWire:
        def changed(response: Json) -> None:
            # A response that was cancelled stays so, whatever its task still says.
            if decoded.fields.stored and stored.running:
                store.update(stored, response)

        shows = decoded.fields.shows_signature
        return ResponsesWire(job.facts, stored.response, decoded.blame, shows_signature=shows, changed=changed)

    def _stored(self, request: Request) -> Stored:
        name = request.path_params["name"]
        stored = self.store(owner_of(request)).find(name)
        if stored is None:
            raise ApiError(
                404, f"Response with id {shown(name)} not found.", code="response_not_found", param="response_id"
            )
        return stored


class _Foreground:
    """An answer that is among those ``running`` meanwhile, and whose response is cancelled when its client leaves."""

    def __init__(self, answer: Answer, wire: ResponsesWire, running: dict[str, Answer]) -> None:
        self._answer = answer
        self._wire = wire
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running[self._wire.id] = self._answer
        try:
            await self._answer(scope, receive, send)
        finally:
            del self._running[self._wire.id]
            self._wire.left()


def _previous(body: Json, store: ResponseStore) -> Stored | None:
    name: Any = body.get("previous_response_id")
    if not isinstance(name, str):
        return None
    stored = store.find(name)
    if stored is None:
        raise ApiError(
            404,
            f"Previous response with id {shown(name)} not found. Responses are kept in memory, up to a bound, and "
            "never with store=false. Send the whole conversation as input.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    if stored.response["status"] not in ("completed", "incomplete"):
        raise ApiError(
            400,
            f"The response {shown(name)} is {stored.response['status']}: only one that is over and has output can "
            "be continued.",
            code="previous_response_not_usable",
            param="previous_response_id",
        )
    return stored


async def _written(value: object, *, is_small: bool) -> bytes:
    """A value as JSON; one that may be large on a thread, so that it does not hold up every stream."""

    def write() -> bytes:
        return json.dumps(value, ensure_ascii=False).encode()

    return write() if is_small else await anyio.to_thread.run_sync(write)


def _include(request: Request) -> list[str]:
    query = request.query_params
    include = [*query.getlist("include"), *query.getlist("include[]")]
    for name in include:
        if name not in (ENCRYPTED_REASONING, IMAGE_URLS):
            raise ApiError(
                400,
                f"include={shown(name)}; there are {ENCRYPTED_REASONING} and {IMAGE_URLS} here.",
                code="unsupported_value",
                param="include",
            )
    return include
