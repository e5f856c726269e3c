"""A client of the Responses API over HTTP, for tests."""

from typing import Any

import anyio
import httpx

from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, says

END_OF_MSG = 258
CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3.0")))
NEVER = Script([], None)
EXACT = "exact; exact=1; repaired=0; missing=0; foreign=0"


class Client:
    """Asks the gateway; keeps the last answer's headers."""

    def __init__(self, gateway: Running, stub: StubEngine) -> None:
        self.http = gateway.client
        self._stub = stub
        self.headers = httpx.Headers()

    async def ask(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """The response to a body, of an engine that generates ``ids``."""
        self._stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG, cached_tokens=3)
        return await self.post("", body)

    async def post(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> dict[str, Any]:
        """POST, which must be answered with ``status``."""
        answer = await self.http.post(f"/v1/responses{path}", json=body)
        assert answer.status_code == status, answer.text
        self.headers = answer.headers
        return answer.json()

    async def get(self, path: str, status: int = 200) -> dict[str, Any]:
        """GET, likewise."""
        answer = await self.http.get(f"/v1/responses/{path}")
        assert answer.status_code == status, answer.text
        return answer.json()

    async def until_over(self, name: str) -> dict[str, Any]:
        """Poll a response as its clients do."""
        while (response := await self.get(name))["status"] in ("queued", "in_progress"):
            await anyio.lowlevel.checkpoint()
        return response

    @property
    def prompt(self) -> list[int]:
        """Ids that the engine was last asked."""
        return self._stub.requests[-1]["input_ids"]
