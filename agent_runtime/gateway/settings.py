"""Everything that can be set about a gateway, validated; unknown keys are refused."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent_runtime.errors import SettingsError
from agent_runtime.upstream.profiles import ProfileName

MIB = 1024 * 1024
GIB = 1024 * MIB

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


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

    context_len: Count
    """Tokens of prompt plus output the engine can hold for one request."""
    max_output_tokens: Count = 131_072
    """Output budget of a request that names none; clamped to what the prompt leaves of ``context_len``."""
    default_temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    default_top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    fixed_sampling: bool = False
    """Sampling is the model's: a request with another temperature, top_p, n or penalty is refused, as on Moonshot's own
    API. Off, requests may choose."""
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

    max_body_bytes: Count = 64 * MIB
    keep_alive_s: Seconds = 15.0
    """Silence on a stream after which a comment line is sent, so that no proxy or client gives up on it."""
    engine_connect_timeout_s: Seconds = 5.0
    engine_idle_timeout_s: Seconds = 900.0
    """Silence of the engine after which a request fails; covers queueing and the longest prefill."""
    shutdown_grace_s: Count = 10
    """Whole seconds running requests may go on after SIGTERM or SIGINT before they are aborted."""

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
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'file'}={item['input']!r}: {item['msg']}"
                for item in error.errors(include_url=False)
            )
            allowed = ", ".join(cls.model_fields)
            raise SettingsError(f"settings file {path}: {problems}. Keys: {allowed}") from error
