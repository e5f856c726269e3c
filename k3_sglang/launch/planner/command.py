"""Arguments of ``python -m k3_sglang.launch plan``, and the plans they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from k3_sglang.config import ConfigError, K3Config
from k3_sglang.launch.engine_mapping import further_flag
from k3_sglang.launch.planner.choose import candidates, compare
from k3_sglang.launch.planner.from_flags import default_chunk, layout_of, page_size, pool_settings_of
from k3_sglang.launch.planner.hardware import GPUS, Gpu, find_gpu
from k3_sglang.launch.planner.layout import Layout
from k3_sglang.launch.planner.plan import DEFAULT_OVERHEAD_GIB, Model, Plan, Workload
from k3_sglang.launch.planner.pools import DEFAULT_STATE_RATIO, PoolSettings
from k3_sglang.launch.planner.release import RELEASE
from k3_sglang.launch.resolve import resolve_model
from k3_sglang.launch.settings import LaunchSettings, SettingsError, read_file, validate
from k3_sglang.loading.inventory import PROJECTOR_PREFIX, TOWER_PREFIX, expected_tensors
from k3_sglang.tiny.trained import RANDOM, TRAINED
from k3_sglang.vision.support import why_text_only

LAYOUT_FLAGS: Final = ("tp", "pp", "ep", "attn_dp", "dcp")
SIZE_FLAGS: Final = (
    *("gpus", "nodes", *LAYOUT_FLAGS, "context_len", "memory_fraction", "state_ratio", "state_slots", "kv_tokens"),
    *("chunked_prefill_tokens", "kv_dtype", "state_dtype", "cache"),
)
"""Arguments that a launch configuration has settings for."""


def plans_from_arguments(asked: argparse.Namespace) -> list[Plan]:
    """Plans of the layouts that were given, or of all worth comparing."""
    if asked.gpu is None:
        raise SettingsError(f"plan needs --gpu ({', '.join(GPUS)}) or --config FILE with a gpu")
    gpu, model = find_gpu(asked.gpu, asked.gpu_memory_gib), find_model(asked.model)
    gpus = asked.gpus or gpu.per_node
    nodes = asked.nodes or max(1, -(-gpus // gpu.per_node))
    given = {name: getattr(asked, name) for name in LAYOUT_FLAGS if getattr(asked, name) is not None}
    layouts = [_layout(given, gpus, nodes)] if given else candidates(gpu, gpus, nodes, model)
    if not layouts:
        raise SettingsError(f"gpus is {gpus} on {nodes} node(s); no layout divides K3's heads so: give tp, pp, attn_dp")
    settings = _pool_settings(asked, gpu, model)
    overhead = asked.overhead_gib
    return compare(
        model, gpu, layouts, settings, _workload(asked), balance=asked.state_ratio is None, overhead_gib=overhead
    )


def plans_from_file(asked: argparse.Namespace) -> list[Plan]:
    """The plan of a launch configuration, with the sizes it gives.

    Raises:
        SettingsError: no kind of GPU; sizes that are the configuration's, given beside it.
    """
    beside = [name for name in SIZE_FLAGS if getattr(asked, name) is not None]
    if beside:
        flag = f"--{beside[0].replace('_', '-')}"
        raise SettingsError(f"plan: {flag} beside --config, which has the sizes; change them in the file")
    values = validate(read_file(Path(asked.config)), source=asked.config)
    name = asked.gpu or values.gpu
    if name is None:
        raise SettingsError(f"{asked.config} names no gpu; add `gpu:` to it or give --gpu: {', '.join(GPUS)}")
    gpu = find_gpu(name, asked.gpu_memory_gib)
    model = find_model(asked.model) if asked.model is not None else _configured(values)
    return [plan_of(values, gpu, model, _workload(asked, values), overhead_gib=asked.overhead_gib)]


def plan_of(
    values: LaunchSettings,
    gpu: Gpu,
    model: Model,
    workload: Workload,
    *,
    overhead_gib: float = DEFAULT_OVERHEAD_GIB,
) -> Plan:
    """The plan of launch settings on a kind of GPU."""
    flags = flags_of(values)
    context = values.context_len or model.text.max_position_embeddings
    settings = pool_settings_of(flags, gpu, context_len=context)
    kept = {"checkpoint_format": values.checkpoint_format, "checkpoint_slots": values.checkpoint_slots or 0}
    settings = replace(settings, **kept)
    return compare(model, gpu, [layout_of(flags)], settings, workload, balance=False, overhead_gib=overhead_gib)[0]


def flags_of(values: LaunchSettings) -> dict[str, str | None]:
    """The SGLang flags of launch settings that decide sizes; as ``launch/command.py`` gives them on a GPU.

    Raises:
        SettingsError: a flag of the ``engine`` mapping that a launch would refuse too.
    """
    sizes = {
        "tp-size": values.tp,
        "pp-size": values.pp,
        "ep-size": values.ep,
        "attn-dp-size": values.attn_dp,
        "dcp-size": values.dcp,
        "nnodes": values.nodes,
        "max-running-requests": values.max_running_requests,
        "max-total-tokens": values.kv_tokens,
        "max-mamba-cache-size": values.state_slots,
        "page-size": values.page_size,
        "chunked-prefill-size": values.chunked_prefill_tokens,
    }
    flags: dict[str, str | None] = {name: str(value) for name, value in sizes.items() if value is not None}
    flags["mamba-radix-cache-strategy"] = "no_buffer" if values.cache == "k3" else "extra_buffer"
    if values.overlap == "off":
        flags["disable-overlap-schedule"] = None
    if values.disaggregation != "none":
        flags["disaggregation-mode"] = values.disaggregation
    taken = dict.fromkeys(sizes, "as its setting says")
    flags |= {name: further_flag(name, value, taken, values.cache) for name, value in values.engine.items()}
    return flags


def _configured(values: LaunchSettings) -> Model:
    """The model of a file; the release where it names none, or a folder that is not here (its name says so)."""
    name = values.model
    if "model" not in values.model_fields_set:
        return RELEASE
    if name in (TRAINED, RANDOM):
        return replace(find_model(str(resolve_model(name))), name=name)
    return find_model(name) if Path(name).is_dir() else replace(RELEASE, name=f"{RELEASE.name} ({name} is not here)")


def find_model(name: str | None) -> Model:
    """The released K3, or the model whose config.json lies in a folder.

    Raises:
        SettingsError: no K3 there.
    """
    if name in (None, "release"):
        return RELEASE
    directory = Path(str(name)).expanduser()
    try:
        config = K3Config.from_dir(directory)
        specs = {} if config.vision is None else expected_tensors(replace(config, text=config.text))
    except ConfigError as error:
        raise SettingsError(f"model {name!r} cannot be planned for: {error}") from error
    vision = 0
    for tensor, spec in specs.items():
        if tensor.startswith((TOWER_PREFIX, PROJECTOR_PREFIX)):
            size = 2
            for length in spec.shape:
                size *= length
            vision += size
    return Model(directory.name, config.text, vision if why_text_only(directory) is None else 0)


def _layout(given: dict[str, int], gpus: int, nodes: int) -> Layout:
    pp = given.get("pp", 1)
    tp = given.get("tp", max(1, gpus // pp))
    if tp * pp != gpus:
        raise SettingsError(f"tp x pp is {tp * pp}, but {gpus} GPUs are asked for; give tp, pp and gpus that agree")
    ep, attn_dp, dcp = (given.get(name, 1) for name in ("ep", "attn_dp", "dcp"))
    return Layout(tp=tp, pp=pp, ep=ep, attn_dp=attn_dp, dcp=dcp, nodes=nodes)


def _pool_settings(asked: argparse.Namespace, gpu: Gpu, model: Model) -> PoolSettings:
    return PoolSettings(
        context_len=min(asked.context_len or model.text.max_position_embeddings, model.text.max_position_embeddings),
        memory_fraction=asked.memory_fraction,
        state_ratio=asked.state_ratio or DEFAULT_STATE_RATIO,
        state_slots=asked.state_slots,
        kv_tokens=asked.kv_tokens,
        max_running_requests=None,
        page_size=page_size({}, gpu),
        kv_dtype_bytes=1 if asked.kv_dtype == "fp8" else 2,
        state_dtype_bytes=2 if asked.state_dtype == "bfloat16" else 4,
        strategy="extra_buffer" if asked.cache == "sglang" else "no_buffer",
        chunked_prefill_tokens=asked.chunked_prefill_tokens or default_chunk(gpu),
    )


def _workload(asked: argparse.Namespace, values: LaunchSettings | None = None) -> Workload:
    defaults = Workload()
    concurrent = asked.concurrent or (values and values.max_running_requests) or defaults.concurrent
    return Workload(
        context=asked.context or defaults.context,
        concurrent=concurrent,
        sessions=asked.sessions or max(defaults.sessions, concurrent),
        turn_tokens=asked.turn_tokens or defaults.turn_tokens,
    )


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, as everywhere in the launcher."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"plan: {message}; --help lists the flags")


def _above_zero(kind: type[int] | type[float]) -> Callable[[str], float]:
    """argparse's ``type`` for numbers above 0: a 0 would read as 'not given'."""

    def number(text: str) -> float:
        value = kind(text)
        if not value > 0 or value == float("inf"):
            raise argparse.ArgumentTypeError(f"it is {text}; it must be above 0")
        return value

    number.__name__ = kind.__name__
    return number


def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m k3_sglang.launch plan",
        description="Which layout and pools a machine gives K3, by arithmetic; nothing is loaded or started.",
        allow_abbrev=False,
    )
    whole: dict[str, Any] = {"type": _above_zero(int), "metavar": "N"}
    real: dict[str, Any] = {"type": _above_zero(float), "metavar": "X"}
    parser.add_argument("--config", metavar="FILE", help="plan the sizes of this launch configuration")
    parser.add_argument("--model", metavar="DIR", help="folder with a K3 config.json (default: the released K3)")
    parser.add_argument("--gpu", metavar="KIND", help=f"{', '.join(GPUS)}")
    parser.add_argument("--gpus", help="GPUs in all (default: one machine's)", **whole)
    parser.add_argument("--nodes", help="machines (default: as many as the GPUs usually take)", **whole)
    parser.add_argument("--gpu-memory-gib", help="GiB that the driver shows, instead of the table's", **real)
    parser.add_argument(
        "--overhead-gib", default=DEFAULT_OVERHEAD_GIB, help="GiB in use before loading (default: 2)", **real
    )
    for name in LAYOUT_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"as in the launch settings: {name}", **whole)
    parser.add_argument("--context", help="tokens of a session when it is longest (default: 131072)", **whole)
    parser.add_argument("--concurrent", help="requests at the same time (default: 32)", **whole)
    parser.add_argument("--sessions", help="open sessions (default: 64)", **whole)
    parser.add_argument("--turn-tokens", help="new tokens of a turn (default: 2000)", **whole)
    parser.add_argument("--context-len", help="longest request that is accepted (default: the model's)", **whole)
    parser.add_argument("--memory-fraction", help="SGLang's mem-fraction-static (default: its own rule)", **real)
    parser.add_argument("--state-ratio", help="SGLang's mamba-full-memory-ratio (default: for the workload)", **real)
    parser.add_argument("--state-slots", help="as in the launch settings", **whole)
    parser.add_argument("--kv-tokens", help="as in the launch settings", **whole)
    parser.add_argument("--chunked-prefill-tokens", help="as in the launch settings", **whole)
    parser.add_argument("--kv-dtype", choices=["bfloat16", "fp8"], help="of latents (default: bfloat16)")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], help="of states (default: float32)")
    parser.add_argument("--cache", choices=["k3", "sglang"], help="as in the launch settings (default: k3)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser
