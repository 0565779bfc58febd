"""The list of decision records is complete and in order."""

import re
from pathlib import Path

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"


def test_each_decision_is_listed_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| \[.+\]\((\d{4})-", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == [int(name) for _, name in rows]
    assert [name for _, name in rows] == sorted(path.name[:4] for path in DECISIONS.glob("[0-9]*.md"))
