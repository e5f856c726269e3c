"""Kimi K3 inside SGLang: model, chat protocol and launcher (importing this loads nothing heavy)."""

__version__ = "0.1.0"
