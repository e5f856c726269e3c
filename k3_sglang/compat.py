"""The only module that names SGLang internals: one table, resolved on first use, checked on one version.

``from k3_sglang.compat import RadixAttention`` imports the upstream object named in :data:`UPSTREAM`. Nothing upstream
is imported until then, so importing this module is cheap and safe before SGLang has parsed its arguments. A version
bump is a change to :data:`SGLANG_VERSION` and, where a name moved, to one line of the table; a test resolves them all.
"""

from __future__ import annotations

import pkgutil
from typing import Any

SGLANG_VERSION = "0.5.23"
"""The SGLang release every name below was checked on."""

UPSTREAM: dict[str, str] = {
    # plugin seams
    "HookRegistry": "sglang.srt.plugins.hook_registry:HookRegistry",
    "HookType": "sglang.srt.plugins.hook_registry:HookType",
    "ModelRegistry": "sglang.srt.models.registry:ModelRegistry",
    "LinearAttnModelSpec": "sglang.srt.configs.linear_attn_model_registry:LinearAttnModelSpec",
    "register_linear_attn_model": "sglang.srt.configs.linear_attn_model_registry:register_linear_attn_model",
    "add_attention_backend_choices": "sglang.srt.arg_groups.choices:add_attention_backend_choices",
    "register_attention_backend": "sglang.srt.layers.attention.attention_registry:register_attention_backend",
    # platform
    "SRTPlatform": "sglang.srt.platforms.interface:SRTPlatform",
    "PlatformCapabilities": "sglang.srt.platforms.interface:PlatformCapabilities",
    "CpuDeviceMixin": "sglang.srt.platforms.cpu:CpuDeviceMixin",
    "PlatformEnum": "sglang.srt.platforms.device_mixin:PlatformEnum",
    # configuration
    "ServerArgs": "sglang.srt.server_args:ServerArgs",
    "KimiLinearConfig": "sglang.srt.configs.kimi_linear:KimiLinearConfig",
    "get_parallel": "sglang.srt.runtime_context:get_parallel",
    # model building blocks
    "RadixAttention": "sglang.srt.layers.radix_attention:RadixAttention",
    "RadixLinearAttention": "sglang.srt.layers.radix_linear_attention:RadixLinearAttention",
    "LogitsProcessor": "sglang.srt.layers.logits_processor:LogitsProcessor",
    "ParallelLMHead": "sglang.srt.layers.vocab_parallel_embedding:ParallelLMHead",
    "VocabParallelEmbedding": "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding",
    "tensor_model_parallel_all_reduce": "sglang.srt.distributed:tensor_model_parallel_all_reduce",
    # attention backends and pools
    "AttentionBackend": "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
    "MambaAttnBackendBase": "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase",
    # prefix cache, driven without an engine by cache.replay
    "set_global_server_args_for_scheduler": "sglang.srt.server_args:set_global_server_args_for_scheduler",
    "Mamba2CacheParams": "sglang.srt.configs.mamba_utils:Mamba2CacheParams",
    "Mamba2StateShape": "sglang.srt.configs.mamba_utils:Mamba2StateShape",
    "HybridReqToTokenPool": "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool",
    "HybridLinearKVPool": "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool",
    "MHATokenToKVPool": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
    "ReqToTokenPool": "sglang.srt.mem_cache.memory_pool:ReqToTokenPool",
    "TokenToKVPoolAllocator": "sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator": "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator",
    "CacheInitParams": "sglang.srt.mem_cache.cache_init_params:CacheInitParams",
    "UnifiedRadixCache": "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
    "ComponentType": "sglang.srt.mem_cache.unified_cache.component_type:ComponentType",
    "ReqKvInfo": "sglang.srt.managers.schedule_batch:ReqKvInfo",
    "match_kv_cache": "sglang.srt.mem_cache.common:match_kv_cache",
    "checkpoint_kv_cache": "sglang.srt.mem_cache.common:checkpoint_kv_cache",
    "release_kv_cache": "sglang.srt.mem_cache.common:release_kv_cache",
    "alloc_req_slots": "sglang.srt.mem_cache.allocation:alloc_req_slots",
    "alloc_token_slots": "sglang.srt.mem_cache.allocation:alloc_token_slots",
}

HOOK_TARGETS: dict[str, str] = {
    "model_config": "sglang.srt.configs.model_config.ModelConfig.__init__",
    "get_tokenizer": "sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer",
    "get_quantization_config": "sglang.srt.model_loader.loader._get_quantization_config",
    "KDAAttnBackend": "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend",
    "cuda_host_register": "sglang.srt.mem_cache.pool_host.common._cuda_host_register",
    "runner_ready": "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
}
"""Dotted paths handed to SGLang's hook registry."""


def resolve(name: str) -> Any:
    """Import the upstream object behind a name of :data:`UPSTREAM`.

    Raises:
        AttributeError: the name is not in the table, or upstream no longer has it.
    """
    if name not in UPSTREAM:
        raise AttributeError(f"k3_sglang.compat has no name {name!r}; add it to UPSTREAM")
    try:
        return pkgutil.resolve_name(UPSTREAM[name])
    except (ImportError, AttributeError) as error:
        raise AttributeError(
            f"SGLang does not provide {UPSTREAM[name]}; this package was checked on sglang=={SGLANG_VERSION}: {error}"
        ) from error


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return resolve(name)
