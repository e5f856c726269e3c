"""Attention backends that bind K3's kernels to SGLang's pools."""
