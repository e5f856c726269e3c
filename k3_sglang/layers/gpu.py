"""Our layers on a GPU: what of SGLang's engine they cannot work with, refused before anything is allocated."""

from __future__ import annotations

from typing import Any, Final

import torch

from k3_sglang.compat import attention_backends, get_exec, get_schedule, get_server_args
from k3_sglang.layers.mla_forms import MLAPlan, plan_mla

UNSUPPORTED: Final[tuple[tuple[str, tuple[object, ...], str], ...]] = (
    ("speculative_algorithm", (None,), "start without speculative decoding"),
    ("dcp_size", (1,), "start without --dcp-size"),
    ("enable_eplb", (False,), "start without --enable-eplb"),
    ("ep_num_redundant_experts", (0,), "start without --ep-num-redundant-experts"),
    ("kv_cache_dtype", ("auto", "bfloat16"), "use --kv-cache-dtype auto"),
    ("enable_lora", (None, False), "start without LoRA"),
)
"""Server arguments our layers were not written for: name, values they take, remedy."""


def on_gpu() -> bool:
    """Whether a module under construction lands on something other than a CPU (SGLang sets torch's default device)."""
    return torch.get_default_device().type != "cpu"


def refusals(server_args: Any) -> list[str]:
    """One line for every server argument that this K3 model class cannot honour on a GPU."""
    return [
        f"{name} is {value!r}, which this K3 model class cannot serve on a GPU; {remedy}, or use --model-impl sglang"
        for name, allowed, remedy in UNSUPPORTED
        if (value := getattr(server_args, name)) not in allowed
    ]


def check_engine() -> None:
    """Refuse an engine whose settings our layers cannot honour.

    Raises:
        ValueError: every such setting, with its remedy.
    """
    found = refusals(get_server_args())
    if found:
        raise ValueError("; ".join(found))
    plan_of_engine()


def plan_of_engine() -> MLAPlan:
    """The attention backends of this engine, as our MLA layer feeds them.

    Raises:
        ValueError: it cannot feed one of them.
    """
    if not on_gpu():
        return MLAPlan("k3_cpu", "k3_cpu")
    prefill, decode = attention_backends()
    return plan_mla(
        prefill,
        decode,
        ragged_prefill=not get_exec().kernel.flashinfer_mla_disable_ragged,
        chunked_prefix_cache=not get_schedule().disable_chunked_prefix_cache,
    )
