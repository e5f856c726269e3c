"""Which field reports and client cases concern the chat protocol, and that each has tests named after it.

Not here, because they concern something else (numbers missing in the survey are B07, B13, B17, B18, B25, B30 and B31):

- B34-B40 prefix cache and recurrent state, B41-B46 loading and launching, B56-B58 speculative decoding;
- B48-B55 and client cases 1-7, 20-32: what an agent or a gateway does with messages (replay, compaction, retries,
  other wire formats), tested there; case 20 (thinking and effort together) is B20 here;
- B59 byte-safe decoding is in test_tokenizer, B60-B62 robustness of server and streams;
- the runtime's half of B03 (keep-alive), B09 (answering an unknown tool), B12 and B21 (not executing, retrying).
"""

import ast
import re
from pathlib import Path

import pytest

REPORTS = (*range(1, 7), *range(8, 13), *range(14, 17), *range(19, 25), *range(26, 30), 32, 33)
CASES = range(8, 20)


def named_tests() -> dict[str, list[str]]:
    """Tests of this folder by the entries in their names."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for entry in re.findall(r"(?<=_)(b\d\d|case\d\d)(?=_)", node.name):
                    found.setdefault(entry, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("entry", [*(f"b{n:02}" for n in REPORTS), *(f"case{n:02}" for n in CASES)])
def test_every_entry_has_a_test_named_after_it(entry: str) -> None:
    assert named_tests().get(entry), f"no test in tests/chat is named test_{entry}_..."


def test_no_test_names_an_entry_that_is_not_listed() -> None:
    listed = {*(f"b{n:02}" for n in REPORTS), *(f"case{n:02}" for n in CASES), "case20"}
    assert named_tests().keys() == listed
