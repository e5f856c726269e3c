"""What the factory takes from the environment and what it refuses, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from k3_sglang.cache.factory import CUT_COST_ENV, placement_settings, refuse_conflicts
from k3_sglang.cache.placement import PlacementSettings


def test_the_cost_of_a_cut_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUT_COST_ENV, raising=False)
    assert placement_settings() == PlacementSettings()
    monkeypatch.setenv(CUT_COST_ENV, "77")
    assert placement_settings().pass_tokens == 77
    for wrong in ("0", "-3", "many", ""):
        monkeypatch.setenv(CUT_COST_ENV, wrong)
        with pytest.raises(ValueError, match="must be a number of tokens"):
            placement_settings()
    monkeypatch.delenv(CUT_COST_ENV)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"enable_session_radix_cache": True}, "takes sessions as hints"),
        ({"eviction_policy": "lfu"}, "evicts by value"),
    ],
)
def test_flags_that_contradict_the_policy_are_refused(flags: dict[str, object], message: str) -> None:
    params = SimpleNamespace(**{"enable_session_radix_cache": False, "eviction_policy": "lru", **flags})
    with pytest.raises(ValueError, match=message):
        refuse_conflicts(params)
