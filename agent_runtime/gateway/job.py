"""From a request body to everything a completion needs: validated, encoded, budgeted, constrained."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from agent_runtime.engine.types import Engine
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.options import ChatOptions, parse_options
from agent_runtime.gateway.prompt import ReplayedPrompt, build_prompt
from agent_runtime.gateway.sampling import output_budget, sampling_params
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.wire import Envelope
from agent_runtime.ledger.recorded import RecordedTurns
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.grammar import turn_grammar
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.request_fields import shown
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts every request uses."""

    settings: GatewaySettings
    engine: Engine
    tokenizer: K3Tokenizer
    recorded: RecordedTurns
    encoded: EncodeCache


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted completion. ``session`` is the client's name for the conversation, "" without one."""

    request: ChatRequest
    options: ChatOptions
    replayed: ReplayedPrompt
    sampling: dict[str, Any]
    envelope: Envelope
    session: str

    @property
    def n(self) -> int:
        """Number of choices."""
        return self.options.n or 1

    def headers(self) -> dict[str, str]:
        """Response headers about where the prompt came from."""
        headers = {"x-k3-replay": self.replayed.replay.header()}
        if self.session:
            headers["x-k3-session"] = quote(self.session, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~")
        return headers


def prepare(body: dict[str, Any], session_header: str, gateway: Gateway) -> Job:
    """Check and encode a request. Raises ApiError. Runs long for long histories; touches no event loop."""
    settings = gateway.settings
    options = parse_options(body)
    _require_model(options.model, settings)
    if (options.n or 1) > settings.max_choices:
        raise ApiError(
            400,
            f"n={shown(options.n)} is more than this server's limit of {settings.max_choices} choices.",
            code="unsupported_value",
            param="n",
        )
    try:
        request = parse_request(body)
        replayed = build_prompt(request, gateway.tokenizer, gateway.recorded, gateway.encoded)
        grammar = turn_grammar(request, request.start, force=settings.constrained_by_default)
    except ChatRequestError as error:
        raise ApiError(400, str(error), code=error.code, param=error.param) from error
    except RecursionError as error:
        raise ApiError(400, "The request is nested too deeply.", code="invalid_json") from error
    budget = output_budget(options, settings, len(replayed.prompt.ids))
    sampling = sampling_params(options, settings, gateway.tokenizer, budget)
    held_to: Mapping[str, Any] = grammar.constraint() if grammar else {}
    loosened = grammar.loosened if grammar else ()
    envelope = Envelope(f"chatcmpl-{secrets.token_hex(16)}", int(time.time()), options.model, replayed.replay, loosened)
    return Job(
        request=request,
        options=options,
        replayed=replayed,
        sampling={**sampling, **held_to},
        envelope=envelope,
        session=session_header or options.prompt_cache_key or "",
    )


def _require_model(model: str, settings: GatewaySettings) -> None:
    served = (settings.model, *settings.model_aliases)
    if model not in served:
        raise ApiError(
            404,
            f"The model {shown(model)} is not served here; use {' or '.join(map(repr, served))}.",
            code="model_not_found",
            param="model",
        )
