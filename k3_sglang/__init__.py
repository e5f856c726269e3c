"""Kimi K3 inside SGLang: model, checkpoint cache, chat protocol and launcher (importing this loads nothing heavy)."""

__version__ = "0.1.0"
