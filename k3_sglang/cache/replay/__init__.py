"""Replays recorded request streams through prefix caches and counts what had to be computed again."""
