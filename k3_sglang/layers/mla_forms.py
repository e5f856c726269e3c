"""In which form SGLang's attention backends want MLA's queries and keys: one table, one choice per forward pass.

- ``joined``: absorbed, ``q`` [T, H, latent + shared] and ``k`` [T, 1, latent + shared] in one tensor each.
- ``split``: absorbed, the same values as ``q``, ``k`` [.., latent] and, apart, ``q_rope``, ``k_rope`` [.., shared].
- ``expanded``: per head, ``q`` and ``k`` [T, H, nope + shared], ``v`` [T, H, v]; new tokens attend to each other only,
  and the layer itself writes the latents to the pool. Some prefill kernels know nothing else.

K3 rotates nothing: "rope" is SGLang's name for the shared part of the key.
Sources in SGLang 0.5.23: ``layers/attention/*_backend.py``, ``models/deepseek_common/attention_backend_handler.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Form = Literal["joined", "split", "expanded"]


@dataclass(frozen=True)
class MLABackend:
    """What one attention backend takes."""

    decode: Form
    cached_prefill: Form | None
    """New tokens after cached ones; None: not at all."""
    fresh_prefill: Form | None
    """No sequence of the batch has cached tokens."""


BACKENDS: Final = {
    "k3_cpu": MLABackend("joined", "joined", "joined"),
    "triton": MLABackend("joined", "joined", "joined"),
    "fa3": MLABackend("split", "split", "split"),
    "flashinfer": MLABackend("split", "split", "expanded"),
    "trtllm_mla": MLABackend("split", "split", "expanded"),
    "cutedsl_mla": MLABackend("split", None, None),
}
"""Backends our MLA layer can feed. fa4, flashmla, cutlass_mla, aiter and others are not among them."""


@dataclass(frozen=True)
class MLAPlan:
    """Attention backends of this engine, checked."""

    prefill: str
    decode: str
    ragged_prefill: bool = True
    """False under ``--flashinfer-mla-disable-ragged``: then the paged kernel also runs fresh prefills."""

    def form(self, *, decoding: bool, any_cached: bool) -> Form:
        """The form for this forward pass.

        Args:
            decoding: one token per sequence.
            any_cached: a sequence of the prefill has cached tokens.
        """
        if decoding:
            return BACKENDS[self.decode].decode
        backend = BACKENDS[self.prefill]
        paged = self.prefill == "flashinfer" and not self.ragged_prefill
        form = backend.cached_prefill if any_cached or paged else backend.fresh_prefill
        assert form is not None, self.prefill  # refused in plan_mla
        return form

    @property
    def expands(self) -> bool:
        """Whether some pass takes the expanded form."""
        return BACKENDS[self.prefill].fresh_prefill == "expanded"


def plan_mla(prefill: str, decode: str, *, ragged_prefill: bool = True, chunked_prefix_cache: bool = False) -> MLAPlan:
    """Check the pair of attention backends.

    Args:
        prefill, decode: their names (``--prefill-attention-backend``, ``--decode-attention-backend``).
        ragged_prefill: no ``--flashinfer-mla-disable-ragged``.
        chunked_prefix_cache: no ``--disable-chunked-prefix-cache``.

    Raises:
        ValueError: one of them cannot be fed by our MLA layer.
    """
    able = [name for name, backend in BACKENDS.items() if backend.cached_prefill is not None]
    if prefill not in able:
        raise ValueError(
            f"prefill attention backend {prefill!r} is not supported by this K3 model class; allowed: {', '.join(able)}"
        )
    if decode not in BACKENDS:
        raise ValueError(
            f"decode attention backend {decode!r} is not supported by this K3 model class; "
            f"allowed: {', '.join(BACKENDS)}"
        )
    if prefill == "trtllm_mla" and chunked_prefix_cache:
        raise ValueError(
            "prefill attention backend 'trtllm_mla' attends to cached tokens chunk by chunk, which this K3 model class "
            "does not do; start with --disable-chunked-prefix-cache (it then takes FlashInfer's paged kernel for them)"
        )
    return MLAPlan(prefill, decode, ragged_prefill)
