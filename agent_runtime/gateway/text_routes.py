"""Routes for those who count in tokens: /v1/tokenize, /v1/detokenize, and raw completions."""

from functools import partial
from typing import Any

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agent_runtime.gateway.body import read_json_object
from agent_runtime.gateway.completions import TextCompletion, parse_completion
from agent_runtime.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError
from agent_runtime.gateway.job import Asked, Gateway, looked_at, require_model
from agent_runtime.gateway.owner import owner_of
from k3_sglang.chat.json_types import is_list
from k3_sglang.chat.request import PROMPT_FIELDS
from k3_sglang.chat.request_fields import shown

_NAMES = frozenset(("prompt_cache_key", "metadata", "user"))
_TEXT_FIELDS = frozenset(("model", "prompt", "add_special_tokens"))
_CHAT_FIELDS = PROMPT_FIELDS | _NAMES | {"model"}
_IDS_FIELDS = frozenset(("model", "tokens", "skip_special_tokens"))


class TextRoutes:
    """Tokens of texts and of conversations, texts of tokens, and what the model writes after a text."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/v1/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """POST /v1/tokenize: ids of a text, or of the prompt that a chat completion would have.

        ``count`` is what ``usage.prompt_tokens`` would be: pictures as the tokens they become, where ``tokens`` has
        one pad for each.
        """
        body = await self._body(request)
        if body is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if "messages" in body:
            _refuse_others(body, _CHAT_FIELDS, "tokenize with messages")
            looked = await looked_at(Asked(body, b"", request.headers, owner=owner_of(request)), self._gateway)
            return self._tokens(list(looked.prompt.ids), looked.prompt_tokens)
        _refuse_others(body, _TEXT_FIELDS, "tokenize")
        _require_false(body, "add_special_tokens", "nothing is added to a text")
        prompt = body.get("prompt")
        encode = self._gateway.tokenizer.encode_text
        if isinstance(prompt, str):
            ids = await anyio.to_thread.run_sync(encode, prompt)
            return self._tokens(ids, len(ids))
        if not is_list(prompt) or not all(isinstance(text, str) for text in prompt):
            raise _invalid("prompt", prompt, "a string, a list of strings, or messages in its place")
        all_ids = await anyio.to_thread.run_sync(lambda: [encode(text) for text in prompt])
        return self._tokens(all_ids, [len(ids) for ids in all_ids])

    async def detokenize(self, request: Request) -> Response:
        """POST /v1/detokenize: the text of ids, control tokens by their spelling."""
        body = await self._body(request)
        if body is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        _refuse_others(body, _IDS_FIELDS, "detokenize")
        _require_false(body, "skip_special_tokens", "control tokens are shown by their spelling")
        tokens = body.get("tokens")
        many = is_list(tokens) and bool(tokens) and all(is_list(run) for run in tokens)
        runs: list[Any] = tokens if many and is_list(tokens) else [tokens]
        for run in runs:
            if not is_list(run) or not all(type(i) is int and 0 <= i < self._gateway.tokenizer.vocab_size for i in run):
                last = self._gateway.tokenizer.vocab_size - 1
                raise _invalid("tokens", run, f"a list of ids from 0 to {last}, or a list of such lists")
        decode = self._gateway.tokenizer.decode
        texts = await anyio.to_thread.run_sync(lambda: [decode(run) for run in runs])
        return JSONResponse({"text": texts if many else texts[0]})

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        body = await self._body(request)
        if body is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        parse = partial(parse_completion, body, self._gateway.settings, self._gateway.tokenizer)
        return TextCompletion(self._gateway, await anyio.to_thread.run_sync(parse))

    async def _body(self, request: Request) -> dict[str, Any] | None:
        """The body, its model checked if it names one; None when the client has left."""
        try:
            body, _ = await read_json_object(request, self._gateway.settings.max_body_bytes)
        except ClientDisconnect:
            return None
        if body.get("model") is None and request.url.path != "/v1/completions":
            body["model"] = self._gateway.settings.model  # there is only one vocabulary
        require_model(body.get("model"), self._gateway.settings)
        return body

    def _tokens(self, ids: list[Any], count: int | list[int]) -> Response:
        return JSONResponse({"tokens": ids, "count": count, "max_model_len": self._gateway.settings.context_len})


def _refuse_others(body: dict[str, Any], known: frozenset[str], what: str) -> None:
    others = [key for key, value in body.items() if key not in known and value is not None]
    if others:
        raise ApiError(
            400,
            f"{what} has no field {shown(others[0])}; it has {', '.join(sorted(known))}.",
            code="unsupported_field",
            param=others[0][:64],
        )


def _require_false(body: dict[str, Any], key: str, reason: str) -> None:
    if body.get(key) not in (None, False):
        raise _invalid(key, body[key], f"false: {reason}")


def _invalid(param: str, value: Any, allowed: str) -> ApiError:
    return ApiError(400, f"{param}: got {shown(value)}; expected {allowed}.", code="invalid_value", param=param)
