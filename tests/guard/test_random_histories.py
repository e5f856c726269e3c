"""Random sessions of faulty clients, many equal in all but their thinking: no turn is given another's."""

import pytest

from benchmarks.replay_guard import MUTATIONS, play


@pytest.mark.parametrize("seed", range(3))
def test_no_turn_is_given_the_thinking_of_another_or_loses_its_own_in_silence(seed: int) -> None:
    result = play(1000, seed)
    assert result.faults == []
    assert set(result.outcomes) == set(MUTATIONS)
    assert result.total("repaired") > 500
    assert result.total("flagged") > 100


def test_a_client_that_changes_nothing_is_exact_wherever_its_turns_are_still_known() -> None:
    result = play(1000, seed=7)
    assert result.outcomes["intact"]["exact"] > 0
    assert set(result.outcomes["intact"]) <= {"exact", "flagged"}
