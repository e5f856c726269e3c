"""What a running SGLang model runner really holds, as plain values for the launcher."""

from __future__ import annotations

from typing import Any


def model_facts(runner: Any) -> dict[str, Any]:
    """Class, architecture, size and placement of the model a runner loaded."""
    model = runner.model
    images = getattr(model, "images", None)
    return {
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "architecture": runner.model_config.hf_config.architectures[0],
        "layers": int(runner.model_config.num_hidden_layers),
        "context_len": int(runner.model_config.context_len),
        "vocab_size": int(runner.model_config.vocab_size),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "image_parameters": 0 if images is None else sum(parameter.numel() for parameter in images.parameters()),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "attention_backend": type(runner.attn_backend).__name__,
    }


def pool_facts(runner: Any) -> dict[str, Any]:
    """Sizes of the token pool and of the state pool of a runner, in tokens, slots and bytes."""
    states = getattr(runner.req_to_token_pool, "mamba_pool", None)
    facts: dict[str, Any] = {
        "kv_tokens": int(runner.max_total_num_tokens),
        "kv_bytes": _kv_bytes(runner.token_to_kv_pool),
        "page_size": int(runner.page_size),
        "max_running_requests": int(runner.req_to_token_pool.size),
        "state_slots": 0,
        "state_bytes_per_slot": 0,
    }
    if states is not None:
        cache = states.mamba_cache
        slots = int(cache.temporal.shape[1])
        held_bytes = cache.temporal.nbytes + sum(conv.nbytes for conv in cache.conv)
        facts["state_slots"] = int(states.size)
        facts["state_bytes_per_slot"] = held_bytes // slots
    return facts


def _kv_bytes(pool: Any) -> int:
    sizes = pool.get_kv_size_bytes()
    return int(sum(sizes)) if isinstance(sizes, tuple) else int(sizes)
