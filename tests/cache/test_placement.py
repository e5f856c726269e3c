"""Prefills are cut where a checkpoint pays for the extra pass, cover the prompt exactly, and never exceed a chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_sglang.cache.placement import PlacementSettings, Reason, Wanted, next_end, plan_chunks

SETTINGS = PlacementSettings()


@given(
    prefix_len=st.integers(0, 5_000),
    extend_len=st.integers(1, 40_000),
    chunk=st.sampled_from([64, 128, 2_048, 16_384]),
    page=st.sampled_from([1, 48, 64]),
    wanted=st.lists(st.builds(Wanted, st.integers(0, 45_000), st.sampled_from(Reason)), max_size=8),
)
def test_chunks_cover_the_prefill_in_order_and_end_at_every_position_that_pays(
    prefix_len: int, extend_len: int, chunk: int, page: int, wanted: list[Wanted]
) -> None:
    prefix_len = prefix_len // page * page
    prompt_len = prefix_len + extend_len
    ends = plan_chunks(prefix_len, prompt_len, chunk, wanted, SETTINGS, page).ends
    starts = (prefix_len, *ends[:-1])
    assert ends[-1] == prompt_len
    assert all(0 < end - start <= chunk for start, end in zip(starts, ends, strict=True))
    assert all(end % page == 0 for end in ends[:-1])
    for start, end in zip(starts, ends, strict=True):
        for want in wanted:
            position = want.position // page * page
            saved = SETTINGS.chance(want.reason) * (position - start)
            assert not (start < position < end and saved > SETTINGS.pass_tokens), "a position that pays was passed over"


def test_a_prefill_without_wishes_is_cut_by_size_only() -> None:
    assert plan_chunks(100, 5_000, 2_048, [], SETTINGS).ends == (2_148, 4_196, 5_000)


def test_the_head_the_boundary_and_the_fork_end_chunks_of_their_own() -> None:
    wanted = [Wanted(3_000, Reason.HEAD), Wanted(12_000, Reason.BOUNDARY), Wanted(7_000, Reason.FORK)]
    assert plan_chunks(0, 15_000, 16_384, wanted, SETTINGS).ends == (3_000, 7_000, 12_000, 15_000)


def test_a_cut_that_saves_less_than_a_pass_costs_is_not_made() -> None:
    near = [Wanted(1_400, Reason.FORK)]  # 400 tokens at one half
    plan = plan_chunks(1_000, 9_000, 16_384, near, SETTINGS)
    assert plan.ends == (9_000,)
    assert plan.refused == 1
    assert plan_chunks(1_000, 9_000, 16_384, near, PlacementSettings(pass_tokens=100)).ends == (1_400, 9_000)


def test_two_reasons_for_one_position_add_up() -> None:
    position = 1_600
    assert next_end(1_000, 9_000, [Wanted(position, Reason.BOUNDARY)], SETTINGS) == (9_000, 1)
    both = [Wanted(position, Reason.BOUNDARY), Wanted(position, Reason.FORK)]
    assert next_end(1_000, 9_000, both, SETTINGS) == (position, 0)


def test_positions_are_rounded_down_to_where_a_state_can_be_kept() -> None:
    end, _ = next_end(192, 9_000, [Wanted(3_000, Reason.HEAD)], SETTINGS, grid=64)
    assert end == 192 + 2_752
    assert (end - 192) % 64 == 0


@pytest.mark.parametrize(("prefix_len", "prompt_len", "chunk"), [(10, 10, 64), (-1, 10, 64), (0, 10, 32)])
def test_impossible_prefills_are_refused(prefix_len: int, prompt_len: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="cannot cut a prefill"):
        plan_chunks(prefix_len, prompt_len, chunk, [], SETTINGS, page_size=64)
