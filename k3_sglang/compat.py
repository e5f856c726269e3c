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
    "get_platform": "sglang.srt.runtime_context:get_platform",
    "get_flags": "sglang.srt.runtime_context:get_flags",
    "get_lora": "sglang.srt.runtime_context:get_lora",
    "get_model": "sglang.srt.runtime_context:get_model",
    "get_spec": "sglang.srt.runtime_context:get_spec",
    "get_schedule": "sglang.srt.runtime_context:get_schedule",
    "attention_backends": "sglang.srt.runtime_context:attention_backends",
    "get_serving": "sglang.srt.runtime_context:get_serving",
    "load_plugins": "sglang.srt.plugins:load_plugins",
    "prepare_server_args": "sglang.srt.server_args:prepare_server_args",
    "override_platform": "sglang.srt.runtime_context:override_platform",
    "resolved_view": "sglang.srt.arg_groups.overrides:resolved_view",
    "memory_hook": "sglang.srt.arg_groups.memory_hook",
    # prefix cache
    "register_radix_cache_backend": "sglang.srt.mem_cache.registry:register_radix_cache_backend",
    "registered_radix_cache_backends": "sglang.srt.mem_cache.registry:registered_radix_cache_backends",
    "create_unified_radix_cache": "sglang.srt.mem_cache.registry:create_unified_radix_cache",
    "zero_match_result": "sglang.srt.mem_cache.base_prefix_cache:zero_match_result",
    "EvictParams": "sglang.srt.mem_cache.base_prefix_cache:EvictParams",
    "ComponentType": "sglang.srt.mem_cache.unified_cache.component_type:ComponentType",
    "CacheTransferPhase": "sglang.srt.mem_cache.unified_cache.components.base:CacheTransferPhase",
    "EvictLayer": "sglang.srt.mem_cache.unified_cache.components.base:EvictLayer",
    "InternalStateBackup": "sglang.srt.mem_cache.unified_cache.components.base:InternalStateBackup",
    "LRURefreshPhase": "sglang.srt.mem_cache.unified_cache.components.base:LRURefreshPhase",
    "MambaComponent": "sglang.srt.mem_cache.unified_cache.components.mamba:MambaComponent",
    "FullComponent": "sglang.srt.mem_cache.unified_cache.components.full:FullComponent",
    "AddReqResult": "sglang.srt.managers.schedule_policy:AddReqResult",
    "mamba_checkpoint_grid": "sglang.srt.runtime_context:mamba_checkpoint_grid",
    "get_disagg": "sglang.srt.runtime_context:get_disagg",
    "MambaSlotAllocator": "sglang.srt.mem_cache.allocator.mamba:MambaSlotAllocator",
    "host_latents": "sglang.srt.mem_cache.pool_host.mla",
    "host_states": "sglang.srt.mem_cache.pool_host.mamba",
    "get_exec": "sglang.srt.runtime_context:get_exec",
    # model building blocks
    "RadixAttention": "sglang.srt.layers.radix_attention:RadixAttention",
    "RadixLinearAttention": "sglang.srt.layers.radix_linear_attention:RadixLinearAttention",
    "LogitsProcessor": "sglang.srt.layers.logits_processor:LogitsProcessor",
    "ParallelLMHead": "sglang.srt.layers.vocab_parallel_embedding:ParallelLMHead",
    "VocabParallelEmbedding": "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding",
    "tensor_model_parallel_all_reduce": "sglang.srt.distributed:tensor_model_parallel_all_reduce",
    # routed experts on a GPU
    "FusedMoE": "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE",
    "Mxfp4Config": "sglang.srt.layers.quantization.mxfp4:Mxfp4Config",
    "Mxfp4MoEMethod": "sglang.srt.layers.quantization.mxfp4:Mxfp4MoEMethod",
    "StandardTopKOutput": "sglang.srt.layers.moe.topk:StandardTopKOutput",
    "MoeRunnerBackend": "sglang.srt.layers.moe.utils:MoeRunnerBackend",
    "get_moe_runner_backend": "sglang.srt.layers.moe.utils:get_moe_runner_backend",
    "get_moe_a2a_backend": "sglang.srt.layers.moe.utils:get_moe_a2a_backend",
    "get_pp_indices": "sglang.srt.distributed.utils:get_pp_indices",
    "PPMissingLayer": "sglang.srt.layers.utils:PPMissingLayer",
    "PPProxyTensors": "sglang.srt.model_executor.forward_batch_info:PPProxyTensors",
    # images
    "BaseMultimodalProcessor": "sglang.srt.multimodal.processors.base_processor:BaseMultimodalProcessor",
    "Modality": "sglang.srt.managers.schedule_batch:Modality",
    "MultimodalDataItem": "sglang.srt.managers.schedule_batch:MultimodalDataItem",
    "MultimodalProcessorOutput": "sglang.srt.managers.schedule_batch:MultimodalProcessorOutput",
    "PROCESSOR_MAPPING": "sglang.srt.managers.multimodal_processor:PROCESSOR_MAPPING",
    "pad_mm_tokens": "sglang.srt.managers.mm_utils:pad_mm_tokens",
    "mm_schedule": "sglang.srt.managers.mm_schedule",
    "prepare_mm_inputs": "sglang.srt.managers.mm_utils:prepare_mm_inputs",
    # weights of a running engine
    "BeginWeightUpdateReqOutput": "sglang.srt.managers.io_struct:BeginWeightUpdateReqOutput",
    # server
    "ServerStatus": "sglang.srt.managers.tokenizer_manager:ServerStatus",
    "http_server_state": "sglang.srt.entrypoints.http_server:_global_state",
    "http_app": "sglang.srt.entrypoints.http_server:app",
    "auth_level": "sglang.srt.utils.auth:auth_level",
    "AuthLevel": "sglang.srt.utils.auth:AuthLevel",
    "DumperControlReqInput": "sglang.srt.managers.io_struct:DumperControlReqInput",
    "DumperControlReqOutput": "sglang.srt.managers.io_struct:DumperControlReqOutput",
    "kill_process_tree": "sglang.srt.utils.common:kill_process_tree",
    # K3's output parsers, for comparison only
    "KimiK3ReasoningDetector": "sglang.srt.parser.reasoning_parser:KimiK3Detector",
    "KimiK3ToolDetector": "sglang.srt.function_call.kimik3_detector:KimiK3Detector",
    # attention backends and pools
    "get_token_to_kv_pool": "sglang.srt.model_executor.forward_context:get_token_to_kv_pool",
    "KVWriteLoc": "sglang.srt.mem_cache.memory_pool:KVWriteLoc",
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
    "RadixKey": "sglang.srt.mem_cache.radix_cache:RadixKey",
    "MatchPrefixParams": "sglang.srt.mem_cache.base_prefix_cache:MatchPrefixParams",
    "InsertParams": "sglang.srt.mem_cache.base_prefix_cache:InsertParams",
    "CacheInitParams": "sglang.srt.mem_cache.cache_init_params:CacheInitParams",
    "UnifiedRadixCache": "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
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
    "get_processor": "sglang.srt.utils.hf_transformers.processor.get_processor",
    "import_processors": "sglang.srt.managers.multimodal_processor.import_processors",
    "tokenize_one_request": "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
    "wait_and_warmup": "sglang.srt.entrypoints.http_server._wait_and_warmup",
    "get_quantization_config": "sglang.srt.model_loader.loader._get_quantization_config",
    "initialize_dummy_weights": "sglang.srt.model_loader.loader.initialize_dummy_weights",
    "update_weights_from_disk": (
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"
    ),
    "update_weights_from_ipc": (
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_ipc"
    ),
    "begin_weight_update": (
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update"
    ),
    "KDAAttnBackend": "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend",
    "init_host_tier": "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache",
    "cuda_host_register": "sglang.srt.mem_cache.pool_host.common._cuda_host_register",
    "prefill_admission": "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission",
    "prefill_continuation": "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
    "waiting_order": "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
    "run_batch": "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "forward_batch": "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    "validate_no_buffer": "sglang.srt.arg_groups.mamba_hook.validate_mamba_no_buffer",
    "told_once": (
        "sglang.srt.managers.scheduler_components.output_streamer."
        "SchedulerOutputStreamer.is_request_level_customized_info_key"
    ),
    "on_idle": "sglang.srt.managers.scheduler.Scheduler.on_idle",
    "control_message": "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control",
    "http_server_setup": "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
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
