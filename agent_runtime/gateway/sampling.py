"""Client options to SGLang's sampling parameters, including the output budget that the window leaves."""

from typing import Any

from agent_runtime.gateway.errors import ApiError, PromptTooLong
from agent_runtime.gateway.options import ChatOptions
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.request_fields import shown
from k3_sglang.chat.tokenizer import K3Tokenizer

NEVER = -1e9
"""Bias that rules an id out; minus infinity is no JSON."""

_ID_DIGITS = 9
_PASSED_ON = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def output_budget(options: ChatOptions, settings: GatewaySettings, prompt_tokens: int) -> int:
    """Output tokens to ask for: the client's limit or the default, clamped to the rest of the window.

    Raises PromptTooLong when the prompt leaves no room for a single token.
    """
    room = settings.context_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, settings.context_len)
    return min(options.output_budget or settings.max_output_tokens, room)


def sampling_params(
    options: ChatOptions, settings: GatewaySettings, tokenizer: K3Tokenizer, max_new_tokens: int
) -> dict[str, Any]:
    """SGLang's ``sampling_params`` for one choice, without constraint. Raises ApiError for seed and logit_bias."""
    temperature = settings.default_temperature if options.temperature is None else options.temperature
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": settings.default_top_p if options.top_p is None else options.top_p,
        "stop_token_ids": [tokenizer.special.end_of_msg],
        # The parser reads structure from ids; the engine's own text is never used.
        "skip_special_tokens": False,
    }
    for name in _PASSED_ON:
        value = getattr(options, name)
        if value is not None:
            params[name] = value
    if options.logit_bias:
        params["logit_bias"] = _logit_bias(options.logit_bias, tokenizer)
    if options.seed is not None and temperature > 0:
        _require_seeds(settings)
        params["sampling_seed"] = options.seed
    return params


def require_fixed_sampling(options: ChatOptions, settings: GatewaySettings) -> None:
    """Hold a request to the model's own sampling, where the settings say so. Raises ApiError that names the field."""
    if not settings.fixed_sampling:
        return
    fixed: dict[str, Any] = {
        "temperature": settings.default_temperature,
        "top_p": settings.default_top_p,
        "top_k": -1,
        "min_p": 0,
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
    }
    for name, value in fixed.items():
        asked = getattr(options, name)
        if asked is not None and asked != value:
            raise ApiError(
                400,
                f"{name} is {shown(asked)}, and this server allows {value} only: sampling is fixed to the model's own. "
                "Send that, or leave it out.",
                code="unsupported_value",
                param=name,
            )


def without_media(params: dict[str, Any], tokenizer: K3Tokenizer) -> dict[str, Any]:
    """Parameters under which no id of an image is generated: no turn holds one, and a pad stands for a picture."""
    special = tokenizer.special
    media = (special.media_begin, special.media_content, special.media_end, special.media_pad)
    return {**params, "logit_bias": {**params.get("logit_bias", {}), **dict.fromkeys(map(str, media), NEVER)}}


def for_choice(params: dict[str, Any], index: int) -> dict[str, Any]:
    """Parameters of choice ``index`` of ``n``: a seed moves on, so that choices differ and can be had again."""
    if index == 0 or "sampling_seed" not in params:
        return params
    seed = params["sampling_seed"] + index
    return {**params, "sampling_seed": seed if seed < 2**63 else seed - 2**64}


def _require_seeds(settings: GatewaySettings) -> None:
    if not settings.seeded_sampling:
        raise ApiError(
            400,
            "seed cannot be honoured: the engine does not sample deterministically. Send temperature=0, leave "
            "seed out, or run the engine with --enable-deterministic-inference and set seeded_sampling.",
            code="unsupported_value",
            param="seed",
        )


def _logit_bias(biases: dict[str, float], tokenizer: K3Tokenizer) -> dict[str, float]:
    """Biases by token id, text tokens only: control tokens are the protocol's, not the client's."""
    for name in biases:
        is_number = name.isascii() and name.isdigit() and len(name) <= _ID_DIGITS
        if not (is_number and int(name) < tokenizer.base_tokens):
            raise ApiError(
                400,
                f"logit_bias has the key {shown(name)}; keys are ids of text tokens, 0 to {tokenizer.base_tokens - 1}.",
                code="invalid_value",
                param="logit_bias",
            )
    return biases
