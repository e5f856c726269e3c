"""Entry point of group ``sglang.srt.plugins``: the only writer to SGLang's registries.

SGLang calls :func:`register` once in every engine process (launcher, tokenizer, scheduler, detokenizer), before
arguments are parsed. SGLang logs and skips a plugin that raises, so each process also announces itself and the
launcher refuses to report ready when an announcement is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3_sglang import compat
from k3_sglang.announce import announce
from k3_sglang.config import ARCHITECTURE
from k3_sglang.platform_cpu import ATTENTION_BACKEND, accelerator_present

MODEL_IMPL_ENV = "K3_SGLANG_MODEL_IMPL"
"""``auto`` (ours without an accelerator, upstream's with one), ``plugin`` (ours) or ``sglang`` (upstream's)."""

DUMP_DIR_ENV = "K3_SGLANG_DUMP_DIR"
"""Names the folder that :mod:`k3_sglang.debug_dump` writes to; without it that module is not imported."""

MODELS_PACKAGE = "k3_sglang.models"

EXTERNAL_PACKAGE_ENV = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""When it names our package, SGLang has registered our classes itself and skips importing its own (faster start)."""

TEXT_ARCHITECTURE_UPSTREAM = "KimiK3LinearForCausalLM"
"""Upstream's name for the text-only model; its own list of architectures with recurrent state forgets it."""


def uses_own_model() -> bool:
    """Whether this process serves our model class.

    Raises:
        ValueError: the environment variable has a value other than the three allowed.
    """
    choice = os.environ.get(MODEL_IMPL_ENV, "auto")
    if choice not in ("auto", "plugin", "sglang"):
        raise ValueError(f"{MODEL_IMPL_ENV} is {choice!r}; allowed: auto, plugin, sglang")
    return choice == "plugin" or (choice == "auto" and not accelerator_present())


def register() -> None:
    """Register model, backends, cache, tokenizer and announcements with SGLang."""
    _register_tokenizer()
    _register_images(uses_own_model())
    _register_text_architecture()
    _register_announcements()
    _register_cache()
    if os.environ.get(DUMP_DIR_ENV):
        compat.HookRegistry.register(compat.HOOK_TARGETS["runner_ready"], _record_passes, compat.HookType.AFTER)
    if uses_own_model():
        if os.environ.get(EXTERNAL_PACKAGE_ENV) != MODELS_PACKAGE:
            compat.ModelRegistry.register(MODELS_PACKAGE, overwrite=True, strict=True)
        compat.HookRegistry.register(
            compat.HOOK_TARGETS["get_quantization_config"], _own_model_unpacks_itself, compat.HookType.AROUND
        )
        _register_loading()
    if not accelerator_present():
        _register_cpu_backends()
    announce("plugin", own_model=uses_own_model(), architecture=ARCHITECTURE)


def _register_tokenizer() -> None:
    from k3_sglang.engine_tokenizer import get_tokenizer_hook

    compat.HookRegistry.register(compat.HOOK_TARGETS["get_tokenizer"], get_tokenizer_hook, compat.HookType.AROUND)


def _register_images(own_model: bool) -> None:
    from k3_sglang.processors.hooks import ImageHooks

    hooks = ImageHooks(own_model)
    for name, hook in {"get_processor": hooks.get_processor, "import_processors": hooks.import_processors}.items():
        compat.HookRegistry.register(compat.HOOK_TARGETS[name], hook, compat.HookType.AROUND)
    before: dict[str, Callable[..., Any]] = {
        "model_config": hooks.model_config,
        "tokenize_one_request": hooks.tokenize_one_request,
        "wait_and_warmup": hooks.wait_and_warmup,
    }
    for name, hook in before.items():
        compat.HookRegistry.register(compat.HOOK_TARGETS[name], hook, compat.HookType.BEFORE)


def _register_text_architecture() -> None:
    compat.register_linear_attn_model(
        compat.LinearAttnModelSpec(
            config_class=compat.KimiLinearConfig,
            backend_class_name="k3_sglang.backends.kda_cpu.KDACpuBackend",
            arch_names=[TEXT_ARCHITECTURE_UPSTREAM],
            uses_mamba_radix_cache=True,
            support_mamba_cache=True,
            support_mamba_cache_extra_buffer=True,
        )
    )


def _register_loading() -> None:
    from k3_sglang.loading.dummy import fill_packed
    from k3_sglang.loading.update import refuse_session, refuse_shared_memory, update_all_or_nothing

    target = compat.HOOK_TARGETS
    compat.HookRegistry.register(target["initialize_dummy_weights"], fill_packed, compat.HookType.AFTER)
    around = compat.HookType.AROUND
    compat.HookRegistry.register(target["update_weights_from_disk"], update_all_or_nothing, around)
    compat.HookRegistry.register(target["update_weights_from_ipc"], refuse_shared_memory, around)
    compat.HookRegistry.register(target["begin_weight_update"], refuse_session, around)


def _register_cache() -> None:
    """Offer the checkpoint cache under its name; the hooks do nothing while another cache is in use."""
    from k3_sglang.cache import control as _control  # noqa: F401  # registers commands
    from k3_sglang.cache import factory, integrity, remote, scheduling, snapshots
    from k3_sglang.cache import inspection as _inspection  # noqa: F401  # registers commands

    if factory.BACKEND not in compat.registered_radix_cache_backends():
        compat.register_radix_cache_backend(factory.BACKEND, factory.build)
    before, around, after = compat.HookType.BEFORE, compat.HookType.AROUND, compat.HookType.AFTER
    for target, hook, kind in [
        ("validate_no_buffer", factory.allow_exact_states, around),
        ("waiting_order", scheduling.order_waiting, after),
        ("prefill_admission", scheduling.select_admission, around),
        ("prefill_continuation", scheduling.add_chunked, around),
        ("run_batch", snapshots.plan_pass, before),
        ("forward_batch", snapshots.copy_behind_pass, after),
        ("on_idle", integrity.check_on_idle, before),
        ("told_once", scheduling.told_once, around),
        ("control_message", remote.handle, around),
        ("http_server_setup", remote.add_routes, before),
    ]:
        compat.HookRegistry.register(compat.HOOK_TARGETS[target], hook, kind)


def _register_announcements() -> None:
    compat.HookRegistry.register(compat.HOOK_TARGETS["runner_ready"], _announce_runner, compat.HookType.AFTER)


def _announce_runner(result: Any, runner: Any) -> None:
    """Tell the launcher, from inside the scheduler, what really runs: model class and both memory pools."""
    from k3_sglang.runner_facts import model_facts, pool_facts

    announce("model", **model_facts(runner))
    announce("pools", **pool_facts(runner))


def _record_passes(result: Any, runner: Any) -> None:
    """Debugging aid, see :mod:`k3_sglang.debug_dump`."""
    from k3_sglang.debug_dump import watch_runner

    watch_runner(runner, Path(os.environ[DUMP_DIR_ENV]))


def _own_model_unpacks_itself(original: Callable[..., Any], model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """No upstream quantization for K3 checkpoints: our model class reads packed experts itself."""
    if model_config.hf_config.architectures[0] in (ARCHITECTURE, TEXT_ARCHITECTURE_UPSTREAM):
        return None
    return original(model_config, *args, **kwargs)


def _register_cpu_backends() -> None:
    from k3_sglang.backends.host_memory import keep_host_memory_pageable
    from k3_sglang.backends.host_tier import provide_copies
    from k3_sglang.backends.kda_cpu import KDACpuBackend
    from k3_sglang.backends.mla_cpu import MLACpuBackend

    keep_host_memory_pageable()
    compat.HookRegistry.register(compat.HOOK_TARGETS["KDAAttnBackend"], KDACpuBackend, compat.HookType.REPLACE)
    compat.HookRegistry.register(
        compat.HOOK_TARGETS["cuda_host_register"], _leave_unregistered, compat.HookType.REPLACE
    )
    compat.HookRegistry.register(compat.HOOK_TARGETS["init_host_tier"], provide_copies, compat.HookType.BEFORE)
    compat.add_attention_backend_choices([ATTENTION_BACKEND])
    compat.register_attention_backend(ATTENTION_BACKEND)(MLACpuBackend)


def _leave_unregistered(buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    """Host pools need no CUDA registration when there is no CUDA."""
