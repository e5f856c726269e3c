"""Which field reports and client cases concern the agent loop, and that each has tests named after it.

Tested elsewhere, because they concern something else (the survey has no B47, B49 and B51):

- B01-B33 and client cases 8-20, as far as text becomes a prompt or a turn: `tests/chat`; here is the loop's half;
- client cases 1, 2, 4-6, 22-24: histories of clients that lose thinking, which a gateway repairs: `tests/guard`,
  `tests/gateway/test_client_cases.py` (and case 30 there with 32 sessions at once);
- case 18 (calls behind the tools section) and 20 (two words for one effort): parser and gateway alone;
- cases 21 and 25: profiles of K2 endpoints, which this client does not speak to.
"""

import ast
import re
from pathlib import Path

import pytest

REPORTS = ("b03", "b09", "b12", "b15", "b21", "b48", "b50", "b52", "b53", "b54", "b55")
CASES = (3, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 26, 27, 28, 29, 30, 31, 32)
ENTRIES = (*REPORTS, *(f"case{number:02}" for number in CASES))


def named_tests() -> dict[str, list[str]]:
    """Tests of the agent and of compression by the entries in their names."""
    found: dict[str, list[str]] = {}
    tests = Path(__file__).parent.parent
    for path in sorted([*tests.glob("agent/test_*.py"), *tests.glob("compression/test_*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for entry in re.findall(r"(?<=_)(b\d\d|case\d\d)(?=_)", node.name):
                    found.setdefault(entry, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_has_a_test_named_after_it(entry: str) -> None:
    assert named_tests().get(entry), f"no test of the agent is named test_{entry}_..."


def test_no_test_names_an_entry_that_is_not_listed() -> None:
    assert named_tests().keys() == set(ENTRIES)
