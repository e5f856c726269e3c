"""The fields of a request as another server takes them: passed on, or refused with the name of its profile."""

from collections.abc import Iterator

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.options import ChatOptions
from agent_runtime.upstream.profiles import Profile
from k3_sglang.chat.request_fields import shown
from k3_sglang.chat.types import ChatRequest, ImagePart, JSONObject, NamedTool

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip
_CACHE_WORK = ("wait_s", "release", "fork", "pin_s")


def check(request: ChatRequest, options: ChatOptions, profile: Profile) -> None:
    """Raise ApiError 400 for the first thing that this kind of server does not honour."""
    for param, reason in _problems(request, options, profile):
        raise ApiError(
            400,
            f"{param} cannot be honoured by the upstream (profile {profile.name}): {reason}.",
            code="unsupported_by_upstream",
            param=param,
        )


def _problems(request: ChatRequest, options: ChatOptions, profile: Profile) -> Iterator[tuple[str, str]]:
    yield from _of_sampling(options, profile)
    if not request.thinking and profile.thinking_off is None:
        yield "thinking", "it always thinks; leave it out"
    choice = request.tool_choice
    word = "named" if isinstance(choice, NamedTool) else choice
    if word is not None and word not in profile.tool_choices:
        yield "tool_choice", f"it takes {', '.join(sorted(profile.tool_choices))}"
    if request.response_format is not None and request.response_format.kind not in profile.response_formats:
        yield "response_format", f"it takes {', '.join(sorted(profile.response_formats)) or 'none'}"
    if not request.parallel_tool_calls and not profile.single_calls:
        yield "parallel_tool_calls", "it may always call several tools at once; leave it out"
    if not profile.strict_tools and any(map(_is_strict, request.declared_tools)):
        yield "tools", "it holds no arguments to a schema; remove strict"
    for index, message in enumerate(request.messages):
        if message.tools and not profile.dynamic_tools:
            yield f"messages[{index}].tools", "it takes tools in the request's own list only"
        if not profile.images and any(isinstance(part, ImagePart) for part in message.content or ()):
            yield f"messages[{index}].content", "it takes no images"
    for name in _CACHE_WORK if options.cache is not None else ():
        if getattr(options.cache, name) is not None:
            yield f"k3.cache.{name}", "there is no cache behind it that this gateway steers"


def _of_sampling(options: ChatOptions, profile: Profile) -> Iterator[tuple[str, str]]:
    for name in _SAMPLING:
        value = getattr(options, name)
        if value is None or name in profile.sampling or value == profile.fixed.get(name):
            continue
        if name in profile.fixed:
            yield name, f"it is fixed at {profile.fixed[name]:g} there, got {shown(value)}; leave it out"
        else:
            yield name, "it does not know the field, or ignores it; leave it out"


def _is_strict(tool: JSONObject) -> bool:
    return bool(tool.get("function", tool).get("strict"))


def body_fields(options: ChatOptions, profile: Profile, budget: int | None) -> JSONObject:
    """The fields beside model, messages and what shapes the prompt. ``budget`` is the limit on output tokens."""
    fields: JSONObject = {
        name: value
        for name in _SAMPLING
        if (value := getattr(options, name)) is not None and (name in profile.sampling or name in profile.fixed)
    }
    if budget is not None:
        fields[profile.budget_field] = budget
    if profile.session_field is not None and options.prompt_cache_key is not None:
        fields[profile.session_field] = options.prompt_cache_key
    return fields


def for_choice(body: JSONObject, index: int) -> JSONObject:
    """The request for choice ``index``: a seed moves on, so that choices differ and can be had again."""
    if index == 0 or "seed" not in body:
        return body
    return {**body, "seed": (body["seed"] + index + 2**63) % 2**64 - 2**63}
