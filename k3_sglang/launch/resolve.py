"""Stage 2: what the settings mean on this machine: model directory and limits, device, ports, pool sizes."""

from __future__ import annotations

import ctypes
import socket
from dataclasses import dataclass
from pathlib import Path

from k3_sglang.config import ConfigError, K3Config
from k3_sglang.launch.deployment import check_deployment, check_layout
from k3_sglang.launch.settings import LaunchSettings, SettingsError
from k3_sglang.tiny.trained import RANDOM, TRAINED, trained
from k3_sglang.vision.support import image_support, why_text_only

LOOPBACK = "127.0.0.1"

CPU_MAX_RUNNING_REQUESTS = 8
CPU_KV_TOKENS = 65_536
"""Without a number SGLang sizes both pools from free memory and spends half a minute zeroing them."""
CPU_STATE_SLOTS = 128
MIN_STATE_SLOTS = 4
"""Slots a running request takes with SGLang's own cache, one more with overlapped steps; three would do with ours."""
CPU_CHUNKED_PREFILL_TOKENS = 2_048
CPU_CUT_COST_TOKENS = 32
GPU_CUT_COST_TOKENS = 256
"""A step by itself reads the weights once more: little for a small model on a CPU, much for a large one on a GPU."""
CPU_PAGE_SIZE = 1
"""Page size 1 matches prefixes to the exact token."""


@dataclass(frozen=True)
class Resolved:
    """A launch with nothing left open; None means SGLang decides (only on a GPU)."""

    settings: LaunchSettings
    model_dir: Path
    config: K3Config
    served_name: str
    untrained: bool
    device: str
    """``cpu`` or ``cuda``."""
    engine_port: int
    gateway_port: int
    dtype: str
    """Of weights and activations; ``auto`` is the checkpoint's."""
    context_len: int
    """Most tokens of prompt and output together."""
    max_running_requests: int | None
    kv_tokens: int | None
    state_slots: int | None
    page_size: int | None
    chunked_prefill_tokens: int | None
    cut_cost_tokens: int
    """Prompt tokens one more prefill step is worth to the k3 cache."""
    overlap: bool
    """Whether the scheduler prepares the next step while one runs."""
    constrain: bool
    """Whether the gateway decodes every request under a turn grammar."""
    why_text_only: str | None
    """Why images are refused; None when they are served."""

    @property
    def own_model(self) -> bool:
        """Whether the engine has to run our model class."""
        return self.settings.model_impl == "plugin" or (self.settings.model_impl == "auto" and self.device == "cpu")

    @property
    def processes(self) -> int:
        """Processes that compute: the ranks of every stage."""
        return self.settings.tp * self.settings.pp

    @property
    def processes_here(self) -> int:
        """Those of them on this machine."""
        return self.processes // self.settings.nodes

    @property
    def has_gateway(self) -> bool:
        """Whether the gateway runs here: on the first machine, and not beside an engine that only reads prompts."""
        return self.settings.node_rank == 0 and self.settings.disaggregation != "prefill"

    @property
    def engine_url(self) -> str:
        """Where this machine finds the engine."""
        return f"http://{reachable(self.settings.engine_host)}:{self.engine_port}"

    @property
    def gateway_url(self) -> str:
        """Where a client on this machine finds the gateway."""
        return f"http://{reachable(self.settings.host)}:{self.gateway_port}"


def reachable(host: str) -> str:
    """How a program on this machine addresses a server that listens on ``host``."""
    host = LOOPBACK if host in ("0.0.0.0", "::") else host
    return f"[{host}]" if ":" in host else host


def resolve(settings: LaunchSettings) -> Resolved:
    """Decide everything the settings leave open.

    Raises:
        SettingsError: no such model, a context longer than the model's, settings that contradict each other.
    """
    device = resolve_device(settings.device)
    cpu = device == "cpu"
    if settings.model_impl == "sglang" and device == "cpu":
        raise SettingsError("model_impl is 'sglang', whose K3 needs a GPU; on device cpu use 'auto' or 'plugin'")
    check_experts(settings, device)
    check_checkpoints(settings)
    check_deployment(settings)
    model_dir = resolve_model(settings.model)
    try:
        config = K3Config.from_dir(model_dir)
        text_only = resolve_images(model_dir, own_model=settings.model_impl == "plugin" or cpu)
    except ConfigError as error:
        raise SettingsError(f"model {settings.model!r} cannot be served: {error}") from error
    check_expert_groups(settings.tp, settings.ep, config.text.moe.num_experts)
    check_layout(settings, config.text)
    untrained = settings.model == RANDOM
    kv_tokens = settings.kv_tokens or (CPU_KV_TOKENS if cpu else None)
    page_size = settings.page_size or (CPU_PAGE_SIZE if cpu else None)
    chunked_prefill_tokens = settings.chunked_prefill_tokens or (CPU_CHUNKED_PREFILL_TOKENS if cpu else None)
    check_pages(page_size, kv_tokens, chunked_prefill_tokens)
    fitting_tokens = largest_request(kv_tokens, page_size)
    gateway_port, engine_port = resolve_ports(settings)
    overlap = not cpu if settings.overlap == "auto" else settings.overlap == "on"
    least_slots = MIN_STATE_SLOTS + (settings.cache == "sglang" and overlap)
    return Resolved(
        settings=settings,
        model_dir=model_dir,
        config=config,
        served_name=settings.served_name or (settings.model if settings.model in (TRAINED, RANDOM) else model_dir.name),
        untrained=untrained,
        device=device,
        engine_port=engine_port,
        gateway_port=gateway_port,
        # CPUs without bfloat16 units multiply float32 several times faster.
        dtype="float32" if cpu and settings.dtype == "auto" else settings.dtype,
        context_len=resolve_context_len(settings.context_len, config.text.max_position_embeddings, fitting_tokens),
        max_running_requests=settings.max_running_requests or (CPU_MAX_RUNNING_REQUESTS if cpu else None),
        kv_tokens=kv_tokens,
        state_slots=resolve_state_slots(settings.state_slots, cpu, least_slots),
        page_size=page_size,
        chunked_prefill_tokens=chunked_prefill_tokens,
        cut_cost_tokens=settings.cut_cost_tokens or (CPU_CUT_COST_TOKENS if cpu else GPU_CUT_COST_TOKENS),
        overlap=overlap,
        constrain=untrained if settings.constrain == "auto" else settings.constrain == "on",
        why_text_only=text_only,
    )


def check_experts(settings: LaunchSettings, device: str) -> None:
    """Refuse a way of keeping experts that the device does not have.

    Raises:
        SettingsError: fused on a CPU; packed or unpacked on a GPU; any of them for upstream's model code.
    """
    allowed = "auto, packed or unpacked" if device == "cpu" else "auto or fused"
    if settings.experts != "auto" and (settings.experts == "fused") == (device == "cpu"):
        raise SettingsError(f"experts is {settings.experts!r}; on device {device} use {allowed}")
    if settings.experts != "auto" and device != "cpu" and settings.model_impl != "plugin":
        raise SettingsError(
            f"experts is {settings.experts!r}, but SGLang's model code keeps them its own way; "
            "leave it at auto or set model_impl to plugin"
        )


def check_checkpoints(settings: LaunchSettings) -> None:
    """Refuse formats of stored states that nobody would use, or without a size.

    Raises:
        SettingsError: naming the setting that is missing or too many.
    """
    form, slots = settings.checkpoint_format, settings.checkpoint_slots
    if form == "state":
        if slots is not None:
            raise SettingsError(f"checkpoint_slots is {slots}, but checkpoints lie among state_slots; leave it out")
        return
    if settings.cache != "k3":
        raise SettingsError(f"checkpoint_format is {form!r}; only the k3 cache stores states so: set cache to k3")
    if slots is None:
        raise SettingsError(f"checkpoint_format is {form!r}; say with checkpoint_slots how many states to keep")


def resolve_model(model: str) -> Path:
    """Directory of the checkpoint: ``tiny`` is in the package, ``tiny-random`` is built when it is not there yet.

    Raises:
        SettingsError: the directory does not exist, or the random model cannot be written.
    """
    if model == TRAINED:
        return trained()
    if model == RANDOM:
        from k3_sglang import tiny  # building imports torch; nothing else here needs it

        try:
            return tiny.ensure()
        except (ImportError, OSError) as error:
            raise SettingsError(f"model is {RANDOM!r}, but it cannot be built: {error}; see docs/launch.md") from error
    directory = Path(model).expanduser()
    if not directory.is_dir():
        raise SettingsError(
            f"model is {model!r}: no such directory; give the folder that holds config.json and the safetensors "
            "files of a K3 checkpoint, or `tiny`, or `tiny-random`"
        )
    return directory.resolve()


def resolve_images(model_dir: Path, *, own_model: bool) -> str | None:
    """Why this launch takes text only, or None when it takes images too.

    Raises:
        ConfigError: the checkpoint describes an image tower or preprocessing that is not supported.
    """
    if not own_model:
        return "SGLang's own K3 prepares pictures with code from the checkpoint, which is never run"
    reason = why_text_only(model_dir)
    if reason is None:
        image_support(model_dir)
    return reason


def largest_request(kv_tokens: int | None, page_size: int | None) -> int | None:
    """Most tokens of one request that the engine carries to its end; None when it sizes the pool itself.

    SGLang keeps two pages back. Of a longer prompt that its own limits let pass it makes no token, or it waits forever.
    """
    if kv_tokens is None:
        return None
    page = page_size or 1
    return kv_tokens // page * page - 2 * page


def resolve_context_len(asked: int | None, model_max: int, fitting_tokens: int | None) -> int:
    """Context length to serve: what is asked for, else the most that the model and the KV pool allow.

    Raises:
        SettingsError: longer than the model's, or than a request that fits into the KV pool.
    """
    if asked is not None and asked > model_max:
        raise SettingsError(f"context_len is {asked}; this model's maximum is {model_max}: ask for at most that")
    if asked is not None and fitting_tokens is not None and asked > fitting_tokens:
        raise SettingsError(
            f"context_len is {asked}, but a request in this KV pool has room for {fitting_tokens} tokens; "
            "raise kv_tokens or lower context_len"
        )
    return asked or min(model_max, fitting_tokens or model_max)


def resolve_state_slots(asked: int | None, cpu: bool, least: int) -> int | None:
    """Size of the state pool; None leaves it to SGLang.

    Raises:
        SettingsError: too few slots to run a single request.
    """
    if asked is not None and asked < least:
        raise SettingsError(f"state_slots is {asked}; one running request alone takes up to {least}")
    return asked or (CPU_STATE_SLOTS if cpu else None)


def check_pages(page_size: int | None, kv_tokens: int | None, chunked_prefill_tokens: int | None) -> None:
    """Refuse sizes that do not fit together in whole pages; SGLang would end with a bare assertion.

    Raises:
        SettingsError: a prefill chunk is not a whole number of pages, or the pool is smaller than three pages.
    """
    if page_size is None:
        return
    if chunked_prefill_tokens is not None and chunked_prefill_tokens % page_size:
        raise SettingsError(
            f"chunked_prefill_tokens is {chunked_prefill_tokens}; it must be a multiple of page_size, {page_size}"
        )
    if kv_tokens is not None and kv_tokens < 3 * page_size:
        raise SettingsError(f"kv_tokens is {kv_tokens}; it must be at least three pages, {3 * page_size}")


def check_expert_groups(tp: int, ep: int, experts: int) -> None:
    """Refuse expert-parallel groups that do not come out even.

    Raises:
        SettingsError: ep does not divide the ranks, or the experts.
    """
    for total, what in ((tp, f"tp, {tp}"), (experts, f"the model's {experts} experts")):
        if total % ep:
            fitting = [size for size in range(1, tp + 1) if tp % size == 0 and experts % size == 0]
            raise SettingsError(
                f"ep is {ep}; it must divide {what}: with tp {tp} choose one of {', '.join(map(str, fitting))}"
            )


def resolve_ports(settings: LaunchSettings) -> tuple[int, int]:
    """Ports of gateway and engine, never the same one.

    Raises:
        SettingsError: both settings name one port, or the host is not an address of this machine.
    """
    if settings.port and settings.port == settings.engine_port:
        raise SettingsError(f"port and engine_port are both {settings.port}; choose two, or 0 for a free one")
    gateway_port = settings.port or free_port(settings.host, other_than=settings.engine_port)
    return gateway_port, settings.engine_port or free_port(settings.engine_host, other_than=gateway_port)


def resolve_device(asked: str) -> str:
    """``cpu`` or ``cuda``; whether there are enough GPUs is for preflight, so that a dry run works anywhere."""
    if asked == "auto":
        return "cuda" if gpu_devices() else "cpu"
    return asked


def gpu_devices() -> int:
    """Number of GPUs that the CUDA driver, else AMD's HIP runtime, shows this process; 0 without either."""
    return cuda_devices() or hip_devices()


def cuda_devices() -> int:
    """Number of GPUs the CUDA driver shows this process (``CUDA_VISIBLE_DEVICES`` included); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def hip_devices() -> int:
    """Number of GPUs AMD's HIP runtime shows (``HIP_VISIBLE_DEVICES`` included); 0 without it."""
    try:
        runtime = ctypes.CDLL("libamdhip64.so")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if runtime.hipGetDeviceCount(ctypes.byref(count)) == 0 else 0


def free_port(host: str, other_than: int = 0) -> int:
    """A TCP port nobody listens on, and not the one given.

    Raises:
        SettingsError: the host is not an address of this machine.
    """
    try:
        while (port := bind_once(host, 0)) == other_than:
            pass
        return port
    except OSError as error:
        raise SettingsError(
            f"host is {host!r}: {error.strerror}; use 127.0.0.1, 0.0.0.0 or an address of this machine"
        ) from error


def bind_once(host: str, port: int) -> int:
    """Bind and release a TCP port; returns its number.

    Raises:
        OSError: the port is taken, or the host is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose old connections are still winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
