"""Everything that can be set about a gateway, validated; unknown keys are refused."""

import json
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from agent_runtime.errors import SettingsError
from agent_runtime.upstream.profiles import ProfileName

MIB = 1024 * 1024
GIB = 1024 * MIB

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is that of this machine to itself."""
    if host.casefold().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class GatewaySettings(BaseModel):
    """Settings of one gateway process; the file of ``python -m agent_runtime.gateway`` is this as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1)]
    """Name the model is served under; requests must use it or an alias."""
    model_aliases: tuple[str, ...] = ()
    engine_url: str = "http://127.0.0.1:30000"
    tokenizer_dir: Path | None = None
    """Needed before an engine; before another server it is what counts tokens.
    Folder with ``tiktoken.model`` (and ``tokenizer_config.json`` when its ids differ from the release's)."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys_file: Path | None = None
    """File with the keys that may use the gateway, `name:key` or `key` a line. What is kept of one name's requests is
    nobody else's."""
    api_keys_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable with such lines, or the same separated by commas."""
    allow_no_keys: bool = False
    """Listen without keys where others can reach the gateway. They share all that is kept, and its costs."""

    context_len: Count
    """Tokens of prompt plus output the engine can hold for one request."""
    max_output_tokens: Count = 131_072
    """Output budget of a request that names none; clamped to what the prompt leaves of ``context_len``."""
    default_temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    default_top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    fixed_sampling: bool = False
    """Sampling is the model's: a request that would change it (temperature, top_p, top_k, min_p, n, penalties,
    logit_bias) is refused, as on Moonshot's own API. Off, requests may choose."""
    max_choices: Count = 8
    """Largest ``n`` of a request."""
    constrained_by_default: bool = False
    """Hold every turn to the K3 turn grammar. For untrained weights, which would not write a legal turn."""
    seeded_sampling: bool = False
    """The engine runs with ``--enable-deterministic-inference``; without it SGLang ignores seeds, so a request
    with one is refused."""

    images: bool = True
    """Take images when the checkpoint in ``tokenizer_dir`` does. False: the engine was started without them."""
    max_images: Count = 256
    """Images in one request, the whole history counted."""
    max_image_tokens: Count = 262_144
    """Prompt tokens that the images of one request may become together; one image is at most some 16,600."""
    allow_image_files: tuple[Path, ...] = ()
    """Folders whose files may be sent as ``file://`` images: every client can read every picture in them."""
    allow_image_hosts: tuple[str, ...] = ()
    """Hosts that http(s) images are fetched from: ``host``, ``host:port``, ``*.domain``, ``*`` (any public host)."""
    image_fetch_timeout_s: Seconds = 10.0
    """Time to read all files and URLs of one request."""

    cache_hints: bool = True
    """Tell an engine that runs the checkpoint cache about sessions and shared positions. It changes the speed only."""
    cache_routes: bool = True
    """Serve the routes that show and steer that cache. Whoever reaches the gateway may then slow others down."""

    max_running: Count = 1024
    """Completions that run at once; so many requests that only count tokens may run besides."""
    max_running_per_key: Count | None = None
    """Of them, those of one owner of keys; None: all."""
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Requests that wait for one of them to end; beyond it they are refused with 429."""
    max_waiting_per_key: Annotated[int, Field(ge=0)] | None = None
    """Of them, those of one owner of keys; None: all."""
    max_wait_s: Seconds = 60.0
    """Time to wait, after which it is a 429 too."""
    max_messages: Count = 16_384
    """Messages of one request."""
    max_tools: Count = 1024
    """Tools of one request."""
    max_header_bytes: Annotated[int, Field(ge=4096)] = 32 * 1024
    """Size of a request's line and headers, beyond which it is a 431."""
    max_headers: Annotated[int, Field(ge=16)] = 100

    metrics: bool = True
    """Serve /metrics, to whoever may ask: counts and times, no content and no names."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written: for people, or one JSON object a line."""

    inspector: Literal["auto", "on", "off"] = "auto"
    """Serve the web page below ``/inspector``; auto: when ``host`` is a loopback address and there are no keys. Whoever
    reaches it sees every session, so there is none where sessions belong to keys."""
    inspector_content: bool = True
    """It shows prompts and answers too, not only counts, times and verdicts."""
    inspector_steps: Count = 10_000
    """Latest requests it knows of, about 1 KB each; content is not kept for it."""

    max_body_bytes: Count = 64 * MIB
    keep_alive_s: Seconds = 15.0
    """Silence on a stream after which a comment line is sent, so that no proxy or client gives up on it."""
    engine_connect_timeout_s: Seconds = 5.0
    engine_idle_timeout_s: Seconds = 900.0
    """Silence of the engine after which a request fails; covers queueing and the longest prefill."""
    shutdown_grace_s: Count = 10
    """Whole seconds running requests may go on after SIGTERM or SIGINT before they are aborted. New ones are refused
    from the signal on."""
    drain_notice_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a gateway at which nothing runs stays after the signal, so that balancers see it is not ready."""

    upstream: Literal["engine", "openai"] = "engine"
    """What answers: a token engine at ``engine_url``, or another server of K3 at ``upstream_url``, message-exact."""
    upstream_url: Annotated[str, Field(pattern=r"^https?://[^/?#\s]+[^?#\s]*$")] | None = None
    """Base URL of that server, ``/v1`` included."""
    upstream_profile: ProfileName = "generic"
    """Which server it is: what it takes and how it spells it (docs/upstreams.md)."""
    upstream_model: Annotated[str, Field(min_length=1)] | None = None
    """The model's name there; the served name when left out."""
    upstream_key_env: str | None = None
    """Environment variable with the key for that server."""
    upstream_key_file: Path | None = None
    """File with that key."""

    guard: Literal["repair", "strict", "off"] = "repair"
    """What is done about turns that do not come back as they were generated: put right, refused with 409, or told
    only."""
    recorded_tokens: Count = 16_000_000
    """Output tokens kept in memory for exact replay, about 16 bytes each with their text."""
    recorded_turns: Count = 100_000
    ledger: Path | None = None
    """File that keeps every request and answer, content included. Without it they are in memory only."""
    ledger_shared: bool = False
    """Several gateways of one machine write to the ledger, all with this setting: each knows the turns of all."""
    ledger_max_bytes: Count = 8 * GIB
    """Size of the ledger at which the sessions unused for longest are deleted."""
    ledger_max_age_days: Annotated[float, Field(gt=0)] | None = None
    """Days after its last use that a session is deleted from the ledger."""
    stored_responses: Count = 10_000
    """Responses of ``/v1/responses`` kept in memory, to be fetched and continued by their id."""
    stored_responses_bytes: Count = 256 * MIB
    """Size of them as JSON, at which the ones unused for longest are dropped."""
    encoded_tokens: Count = 4_000_000
    """Prompt tokens of messages kept so that a history is not tokenised again: about 15 bytes each, text included."""

    @model_validator(mode="after")
    def _a_shared_ledger_is_named(self) -> "GatewaySettings":
        if self.ledger_shared and self.ledger is None:
            raise ValueError("ledger_shared is true and ledger is not set; name the file, or remove ledger_shared")
        return self

    @model_validator(mode="after")
    def _backend_is_complete(self) -> "GatewaySettings":
        if self.upstream == "engine":
            given = sorted(name for name in self.model_fields_set if name.startswith("upstream_"))
            if given:
                raise ValueError(f"{given[0]} is set and upstream is 'engine'; set upstream to 'openai' or remove it")
            if self.tokenizer_dir is None:
                raise ValueError("tokenizer_dir is needed before an engine")
            return self
        if self.upstream_url is None:
            raise ValueError("upstream is 'openai' and upstream_url is not set; give the base URL, /v1 included")
        if self.upstream_key_env is not None and self.upstream_key_file is not None:
            raise ValueError("upstream_key_env and upstream_key_file are both set; keep one")
        if self.constrained_by_default or self.seeded_sampling:
            raise ValueError("constrained_by_default and seeded_sampling are settings of an engine, not of an upstream")
        return self

    @model_validator(mode="after")
    def _others_need_keys(self) -> "GatewaySettings":
        if self.api_keys_file is not None and self.api_keys_env is not None:
            raise ValueError("api_keys_file and api_keys_env are both set; keep one")
        has_keys = self.has_keys
        if has_keys and self.allow_no_keys:
            raise ValueError("allow_no_keys is true and there are API keys; keep one")
        if not (has_keys or self.allow_no_keys or is_loopback(self.host)):
            raise ValueError(
                f"host is {self.host!r}, where others can reach the gateway, and there are no API keys; set "
                "api_keys_file or api_keys_env, or listen on 127.0.0.1, or set allow_no_keys to true"
            )
        if has_keys and self.inspector == "on":
            raise ValueError(
                "inspector is 'on' and there are API keys: it shows every session, whosever it is; leave it at auto, "
                "or serve it by a gateway without keys on 127.0.0.1"
            )
        return self

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return self.api_keys_file is not None or self.api_keys_env is not None

    @property
    def inspects(self) -> bool:
        """Whether the inspector is served."""
        return self.inspector == "on" or (self.inspector == "auto" and is_loopback(self.host) and not self.has_keys)

    @classmethod
    def from_file(cls, path: Path) -> "GatewaySettings":
        """Read a JSON file. Raises SettingsError that names the file, the key, its value and what is allowed."""
        try:
            values: Any = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from error
        except ValueError as error:
            raise SettingsError(f"settings file {path} is not JSON: {error}") from error
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(map(_problem, error.errors(include_url=False)))
            unknown = any(item["type"] == "extra_forbidden" for item in error.errors())
            allowed = f". Keys: {', '.join(cls.model_fields)}" if unknown else ""
            raise SettingsError(f"settings file {path}: {problems}{allowed}") from error


def _problem(error: ErrorDetails) -> str:
    where = ".".join(map(str, error["loc"]))
    if not error["loc"]:
        return f"{error['msg'].removeprefix('Value error, ')}"
    # Somebody may have put a key where its variable's name belongs.
    got = "text that is no variable's name" if where == "api_keys_env" else repr(error["input"])
    return f"{where}={got}: {error['msg']}"
