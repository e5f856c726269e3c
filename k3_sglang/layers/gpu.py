"""Our layers on a GPU: what of SGLang's engine they cannot work with, refused before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from k3_sglang.compat import (
    attention_backends,
    get_exec,
    get_lora,
    get_model,
    get_parallel,
    get_schedule,
    get_spec,
)
from k3_sglang.layers.mla_forms import MLAPlan, plan_mla

SUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "speculative-algorithm": (None,),
    "dcp-size": (1,),
    "enable-eplb": (False,),
    "ep-num-redundant-experts": (0,),
    "kv-cache-dtype": ("auto", "bf16", "bfloat16"),
    "enable-lora": (None, False),
    "cuda-graph-backend-prefill": ("disabled",),
}
"""Server arguments our layers honour with these values only; with others they are wrong or were never tried."""


def engine_settings() -> dict[str, object]:
    """What those arguments came to in this process (SGLang decides some that were left open)."""
    moe = get_exec().moe
    return {
        "speculative-algorithm": get_spec().speculative_algorithm,
        "dcp-size": get_parallel().dcp_size,
        "enable-eplb": moe.enable_eplb,
        "ep-num-redundant-experts": moe.ep_num_redundant_experts,
        "kv-cache-dtype": get_model().kv_cache_dtype,
        "enable-lora": get_lora().enable_lora,
        "cuda-graph-backend-prefill": get_exec().graph.cuda_graph_config.prefill.backend,
    }


def on_gpu() -> bool:
    """Whether a module under construction lands on something other than a CPU (SGLang sets torch's default device)."""
    return torch.get_default_device().type != "cpu"


def refusals(settings: Mapping[str, object]) -> list[str]:
    """One line for every setting that this K3 model class cannot honour on a GPU."""
    return [
        f"--{name} is {settings[name]!r}; on a GPU this K3 model class allows {' or '.join(map(repr, allowed))}"
        for name, allowed in SUPPORTED.items()
        if settings[name] not in allowed
    ]


def check_engine() -> None:
    """Refuse an engine whose settings our layers cannot honour.

    Raises:
        ValueError: every such setting, with what is allowed.
    """
    found = refusals(engine_settings())
    if found:
        raise ValueError("; ".join([*found, "or use --model-impl sglang"]))
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
