"""Gated NoPE multi-head latent attention in absorbed form over the latent KV pool (technical report eq. 7).

Architecture facts (``text_config``):

- ``q = q_b(RMS(q_a(x)))``; ``[c ; kr] = kv_a(x)``, ``c = RMS(c)``; both latent norms use eps 1e-6, not
  the config's 1e-5.
- ``k_h = [kv_b_k(c) ; kr]``, ``v_h = kv_b_v(c)``; no rotation anywhere (``mla_use_nope``); softmax scale 192^-0.5.
- output gate: ``o_proj(o * sigmoid(g_proj(x)))``.

Absorbed: ``q . k_h = (q_nope kv_b_k_h) . c + q_rope . kr``, so attention runs over the cached 576 values as one
shared key head whose value is its first 512, and ``kv_b_v`` is applied to the result. SGLang's backends differ in how
they want this; :mod:`k3_sglang.layers.mla_forms` says which form each pass takes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from k3_sglang.compat import KVWriteLoc, RadixAttention, get_token_to_kv_pool
from k3_sglang.config import MLA_LATENT_NORM_EPS, TextConfig
from k3_sglang.layers.gpu import plan_of_engine
from k3_sglang.layers.mla_forms import Form
from k3_sglang.layers.norm import rms_norm
from k3_sglang.layers.parallel import Ranks, weight


class MLALayer(torch.nn.Module):
    """One MLA attention block; heads are split over tensor-parallel ranks, the latent is replicated."""

    def __init__(self, config: TextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        mla = config.mla
        self.mla = mla
        self.heads = ranks.share(mla.num_heads, "MLA heads")
        self._ranks = ranks
        value_width = self.heads * mla.v_head_dim
        self.in_sizes = (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim, value_width)
        """Rows of ``in_proj``: q_a, latent, shared key part, output gate."""

        self.in_proj = weight(sum(self.in_sizes), config.hidden_size)
        self.q_a_norm = weight(mla.q_lora_rank)
        self.kv_a_norm = weight(mla.kv_lora_rank)
        self.q_b_proj = weight(self.heads * mla.qk_head_dim, mla.q_lora_rank)
        self.kv_b_proj = weight(self.heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        self.o_proj = weight(config.hidden_size, value_width)
        self.attn = RadixAttention(
            num_heads=self.heads,
            head_dim=mla.latent_dim,
            scaling=mla.scaling,
            num_kv_heads=1,
            layer_id=layer,
            v_head_dim=mla.kv_lora_rank,
        )
        self.plan = plan_of_engine()
        self.attn_expanded = self._per_head_attention(layer) if self.plan.expands else None

    def _per_head_attention(self, layer: int) -> Any:
        """Attention over keys and values of each head, for prefill kernels that know no latent."""
        return RadixAttention(
            num_heads=self.heads,
            head_dim=self.mla.qk_head_dim,
            scaling=self.mla.scaling,
            num_kv_heads=self.heads,
            layer_id=layer,
            v_head_dim=self.mla.v_head_dim,
        )

    def forward(self, x: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """[T, C] normed input to [T, C] attention output."""
        q_a, latent, shared_key, output_gate = F.linear(x, self.in_proj).split(self.in_sizes, dim=-1)
        latent = rms_norm(latent, self.kv_a_norm, MLA_LATENT_NORM_EPS)
        q = F.linear(rms_norm(q_a, self.q_a_norm, MLA_LATENT_NORM_EPS), self.q_b_proj)
        q = q.view(-1, self.heads, self.mla.qk_head_dim)
        form = self._form(forward_batch)
        if form == "expanded":
            value = self._attend_per_head(q, latent, shared_key, forward_batch)
        else:
            value = self._attend_absorbed(q, latent, shared_key, forward_batch, form)
        return self._ranks.all_reduce(F.linear(value * torch.sigmoid(output_gate), self.o_proj))

    def _form(self, forward_batch: Any) -> Form:
        mode = forward_batch.forward_mode
        decoding = mode.is_decode_or_idle()
        lens = None if decoding else forward_batch.extend_prefix_lens_cpu
        return self.plan.form(decoding=decoding, any_cached=lens is None or any(lens))

    def _attend_absorbed(
        self, q: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor, forward_batch: Any, form: Form
    ) -> torch.Tensor:
        """q [T, H, nope + rope], latent [T, kv_lora] and shared key [T, rope] to values [T, H * v]."""
        mla = self.mla
        q_nope, q_shared = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        up_key = self.kv_b_proj[:, : mla.qk_nope_head_dim]  # [H, nope, kv_lora]
        up_value = self.kv_b_proj[:, mla.qk_nope_head_dim :]  # [H, v, kv_lora]
        absorbed = torch.bmm(q_nope.transpose(0, 1), up_key).transpose(0, 1)  # [T, H, kv_lora]
        if form == "joined":
            query = torch.cat((absorbed, q_shared), dim=-1)
            key = torch.cat((latent, shared_key), dim=-1).unsqueeze(1)  # [T, 1, kv_lora + rope]
            o = self.attn(query, key, key[..., : mla.kv_lora_rank], forward_batch)
        else:
            key = latent.unsqueeze(1)
            rope = {"q_rope": q_shared, "k_rope": shared_key.unsqueeze(1)}
            o = self.attn(absorbed, key, key, forward_batch, **rope)
        o = o.view(-1, self.heads, mla.kv_lora_rank).transpose(0, 1)
        return torch.bmm(o, up_value.transpose(1, 2)).transpose(0, 1).reshape(q.shape[0], -1)

    def _attend_per_head(
        self, q: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        """The same for a batch without cached tokens: latents go to the pool, attention sees whole keys and values."""
        mla = self.mla
        assert self.attn_expanded is not None
        where = KVWriteLoc.for_batch(forward_batch)
        get_token_to_kv_pool().set_mla_kv_buffer(self.attn, where, latent.unsqueeze(1), shared_key.unsqueeze(1))
        up = F.linear(latent, self.kv_b_proj.flatten(0, 1)).view(q.shape[0], self.heads, -1)
        k_nope, value = up.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        key = torch.cat((k_nope, shared_key.unsqueeze(1).expand(-1, self.heads, -1)), dim=-1)
        o = self.attn_expanded(q, key, value.contiguous(), forward_batch, save_kv_cache=False)
        return o.reshape(q.shape[0], -1)
