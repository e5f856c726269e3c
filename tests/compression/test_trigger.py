"""When a history is compressed, and when not again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.compression.trigger import CompressionSettings, Pace, clamp_output


@pytest.mark.parametrize(
    ("window", "trigger"),
    [(None, 300_000), (1_048_576, 300_000), (400_000, 300_000), (262_144, 196_608), (4096, 3072), (2, 1)],
)
def test_the_default_trigger_is_300000_and_scales_with_smaller_windows(window: int | None, trigger: int) -> None:
    settings = CompressionSettings(window_tokens=window)
    assert settings.trigger == trigger


def test_it_is_due_at_the_trigger_and_not_one_token_before() -> None:
    pace = Pace(CompressionSettings())
    assert not pace.due(299_999) and pace.due(300_000) and pace.due(300_000), "asking changes nothing"
    assert not pace.due(None), "an unknown size is no reason"


def test_after_a_success_below_the_trigger_it_is_due_at_the_trigger_again() -> None:
    pace = Pace(CompressionSettings(trigger_tokens=100))
    pace.succeeded(20)
    assert not pace.due(99) and pace.due(100)


def test_after_a_success_that_stayed_above_the_trigger_the_history_must_grow_first() -> None:
    pace = Pace(CompressionSettings(trigger_tokens=100))
    pace.succeeded(150)
    assert not pace.due(154) and pace.due(155)


def test_a_size_that_is_known_only_after_the_next_call_is_judged_then() -> None:
    pace = Pace(CompressionSettings(trigger_tokens=100))
    pace.succeeded(None)
    assert not pace.due(150) and not pace.due(154) and pace.due(155)


def test_failures_in_a_row_are_bounded_and_a_success_resets_them() -> None:
    pace = Pace(CompressionSettings(trigger_tokens=100, max_failures=2))
    pace.failed(100)
    assert not pace.due(104) and pace.due(105)
    pace.succeeded(10)
    pace.failed(100)
    pace.failed(105)
    assert not pace.due(10_000)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2), st.integers(0, 2000)), max_size=60))
def test_however_sizes_move_compressions_do_not_follow_each_other_without_growth(
    moves: list[tuple[int, int, int]],
) -> None:
    """Between two attempts either a compression got below the trigger, or the history grew by a 20th of it."""
    pace, last = Pace(CompressionSettings(trigger_tokens=1000)), None
    for size, how, after in moves:
        if not pace.due(size):
            continue
        assert size >= 1000
        assert last is None or size >= last + 50
        if how == 0:
            pace.failed(size)
            last = size
        else:
            pace.succeeded(after)
            last = after if after >= 1000 else None


def test_settings_that_cannot_work_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="trigger_tokens=4096 does not leave room in a window of 4096 tokens"):
        CompressionSettings(trigger_tokens=4096, window_tokens=4096)
    with pytest.raises(ValueError, match="user_head_tokens=2000 is more than user_tokens=10"):
        CompressionSettings(user_tokens=10)
    with pytest.raises(ValueError, match="max_calls=0, must be at least 1"):
        CompressionSettings(max_calls=0)
    with pytest.raises(ValueError, match="keep_turns=-1"):
        CompressionSettings(keep_turns=-1)


def test_the_output_budget_is_clamped_to_what_the_window_leaves() -> None:
    """Case 32: a client that asks for a whole window of output gets what fits, not a refusal."""
    assert clamp_output(1_048_576, 300_000, 1_048_576) == 748_576
    assert clamp_output(100, 300_000, 1_048_576) == 100
    assert clamp_output(None, 10, 100) == 90 and clamp_output(None, 200, 100) == 1
    assert clamp_output(7, None, 100) == 7 and clamp_output(None, 10, None) is None
