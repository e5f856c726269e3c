"""Part of gpu_contracts.py: what our attention layers hand to SGLang's backends, and the whole stack without data."""

from __future__ import annotations

import ast
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.kimi_k3 import KimiK3DeltaAttention

from k3_sglang.config import TextConfig
from k3_sglang.layers.decoder import K3TextModel
from k3_sglang.layers.fused_experts import FusedExperts
from k3_sglang.layers.gpu import check_engine
from k3_sglang.layers.kda import KDALayer
from k3_sglang.layers.mla import MLALayer
from k3_sglang.layers.mla_forms import MLAPlan
from k3_sglang.layers.moe import LatentMoE
from k3_sglang.layers.parallel import Ranks
from tests.model.gpu_contracts_machine import BLACKWELL, HOPPER, Recorder, attending, batch, describe, engine, raises

ATTENTION_CLASSES = {
    "flashinfer": ("flashinfer_mla_backend", "FlashInferMLAAttnBackend"),
    "fa3": ("flashattention_backend", "FlashAttentionBackend"),
    "trtllm_mla": ("trtllm_mla_backend", "TRTLLMMLABackend"),
    "cutedsl_mla": ("cutedsl_mla_backend", "CuteDslMLABackend"),
    "triton": ("triton_backend", "TritonAttnBackend"),
}


def kda_inputs(text: Any, config: TextConfig) -> dict[str, Any]:
    """Our KDA layer beside SGLang's own: attributes its backend reads, and what a pass hands to it."""
    with engine(HOPPER), torch.device("cpu"):
        ours = KDALayer(config, 0, Ranks())
        theirs = KimiK3DeltaAttention(0, config.hidden_size, text, rms_norm_eps=config.rms_norm_eps)
    facts: dict[str, Any] = {}
    for name in ("conv_weights", "A_log", "dt_bias", "bias", "lower_bound", "activation", "layer_id"):
        facts[name] = [describe(getattr(layer.attn, name), flat=name == "A_log") for layer in (ours, theirs)]
    heads = ("num_q_heads", "num_k_heads", "num_v_heads", "head_q_dim", "head_k_dim", "head_v_dim")
    facts["heads"] = [[getattr(layer.attn, name) for name in heads] for layer in (ours, theirs)]
    x = torch.randn(4, config.hidden_size, dtype=torch.bfloat16)
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        handed = []
        for run in (lambda b: ours(x, b), lambda b: theirs(x, None, b, None)):
            recorder = Recorder()
            with attending(recorder):
                assert raises(lambda run=run, mode=mode: run(batch(mode))).startswith("Recorded")
            handed.append({name: describe(recorder.calls[0][name]) for name in ("mixed_qkv", "a", "b")})
        facts[f"handed {mode.name}"] = handed
    facts["rows of in_proj"] = ours.in_proj.shape[0]
    return facts


def mla_forms(config: TextConfig) -> dict[str, Any]:
    """Per backend and kind of pass: does the call bind to its real method, and is the result the joined form's?"""
    torch.manual_seed(4)
    layer = MLALayer(config, 0, Ranks()).float()
    for parameter in layer.parameters():
        parameter.data.normal_().mul_(0.1)
    layer.attn_expanded = layer._per_head_attention(0)
    x, cached = torch.randn(4, config.hidden_size).float(), torch.randn(3, config.mla.latent_dim).float()
    passes = {
        "fresh": batch(ForwardMode.EXTEND, [0]),
        "cached": batch(ForwardMode.EXTEND, [3]),
        "decode": batch(ForwardMode.DECODE),
    }
    facts = {}
    for name, (module, upstream) in ATTENTION_CLASSES.items():
        for kind, forward_batch in passes.items():
            if name == "cutedsl_mla" and kind != "decode":
                continue
            results = []
            for backend in ("k3_cpu", name):
                layer.plan = MLAPlan("k3_cpu" if name == "cutedsl_mla" else backend, backend)
                recorder = Recorder(partial(attend, kind, cached))
                with attending(recorder):
                    results.append(layer(x, forward_batch))
            taken = parameters_of(module, upstream, "forward_decode" if kind == "decode" else "forward_extend")
            assert set(recorder.calls[-1]) <= set(taken), (name, kind, taken)
            facts[f"{name} {kind}"] = float((results[0] - results[1]).abs().max() / results[0].abs().max())
    return facts


def parameters_of(module: str, name: str, method: str) -> list[str]:
    """Parameter names of a backend's method, read from its source: importing some backends needs a GPU's driver."""
    spec = importlib.util.find_spec(f"sglang.srt.layers.attention.{module}")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    function = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return [argument.arg for argument in function.args.args]


def attend(
    kind: str, cached: torch.Tensor, *, recorder: Recorder, q: Any, k: Any, v: Any, layer: Any, **more: Any
) -> torch.Tensor:
    """Attention by definition over whatever form arrives; with views as SGLang's backends take them."""
    heads, width = layer.tp_q_head_num, layer.v_head_dim
    if "k_rope" in more:
        q = torch.cat((q.view(-1, heads, width), more["q_rope"].view(-1, heads, layer.head_dim - width)), -1)
        k = torch.cat((k, more["k_rope"]), -1)
    else:
        q = q.view(-1, heads, layer.head_dim)
    k, v = k.view(-1, layer.tp_k_head_num, layer.head_dim), v.view(-1, layer.tp_v_head_num, width)
    if layer.tp_k_head_num == 1 and kind != "fresh":
        k = torch.cat((cached.unsqueeze(1), k))
        v = k[..., :width]
    elif layer.tp_k_head_num > 1:
        assert not more["save_kv_cache"] and recorder.calls[0]["written"].shape == (4, 1, cached.shape[1])
    k, v = (part.expand(-1, heads, -1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * layer.scaling
    scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1 + k.shape[0] - q.shape[0]), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(q.shape[0], -1)


def stack_on_meta(config: TextConfig) -> dict[str, Any]:
    """The decoder on a device without data: a look at a value, which on a GPU would be a wait, is an error here."""
    facts: dict[str, Any] = {}
    for machine, backend in ((HOPPER, "flashinfer"), (HOPPER, "fa3"), (BLACKWELL, "trtllm_mla")):
        with engine(machine, attention_backend=backend, disable_chunked_prefix_cache=True), torch.device("meta"):
            model = K3TextModel(config, Ranks(), "fused")
            kernels = 0
            for layer in model.stack:
                if isinstance(layer.ffn, LatentMoE) and isinstance(layer.ffn.experts, FusedExperts):
                    layer.ffn.experts.fused.run_moe_core = lambda dispatch_output: StandardCombineInput(
                        hidden_states=torch.empty_like(dispatch_output.hidden_states)
                    )
                    kernels += 1
            for kind, forward_batch in (
                ("fresh", batch(ForwardMode.EXTEND, [0])),
                ("cached", batch(ForwardMode.EXTEND, [3])),
                ("decode", batch(ForwardMode.DECODE)),
            ):
                recorder = Recorder(empty_output)
                with attending(recorder), torch.inference_mode():
                    out = model(torch.empty(4, dtype=torch.int64), forward_batch, None)
                attended = sum("written" not in call for call in recorder.calls)
                facts[f"{backend} {kind}"] = [describe(out), out.device.type, attended, kernels]
    return facts


def empty_output(layer: Any, q: Any = None, mixed_qkv: Any = None, **_: Any) -> torch.Tensor:
    """An attention output of the right shape."""
    if mixed_qkv is not None:
        return mixed_qkv.new_empty(1, mixed_qkv.shape[0], layer.num_v_heads, layer.head_v_dim)
    return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)


def refused() -> dict[str, str]:
    """What an engine is told whose settings our layers cannot honour, before anything is allocated."""
    found = {}
    good = {"attention_backend": "trtllm_mla", "disable_chunked_prefix_cache": True}
    off, captured = (
        {"cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend=backend))}
        for backend in ("disabled", "breakable")
    )
    for name, arguments in (
        ("supported", {**good, **off}),
        ("unsupported", {**good, **captured, "speculative_algorithm": "EAGLE", "kv_cache_dtype": "fp8_e4m3"}),
        ("chunked prefix cache", {**off, "attention_backend": "trtllm_mla"}),
    ):
        with engine(BLACKWELL, **arguments), torch.device("meta"):
            found[name] = raises(check_engine)
    return found
