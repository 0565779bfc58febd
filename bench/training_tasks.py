"""The tasks of `bench.training`: shell, SQL and video, each with eight moves that a policy chooses from.

Tools wait as long as tools of their kind do: a build or a test run waits for 0.2 to 0.4 s, and a slow query counts for
about 0.1 s. All of them are deterministic, so that two runs can be compared move by move.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkpoint.client import Rollout
from forkpoint.results import CallResult

MOVES, TURNS = 8, 4


@dataclass(frozen=True)
class TrainingTask:
    """A task of the benchmark.

    Attributes:
        kind: `shell`, `sql` or `video`: which endpoint its calls go to.
        moves: The calls that the policy chooses from: commands, statements, or a video tool's name with its arguments.
        goal: The answer to `grade` that is rewarded; for video, the moves that must be made in this order.
        grade: The call that follows the last turn; None for video.
        spec: Its environment.
    """

    name: str
    kind: str
    moves: Sequence[Any]
    goal: Any
    grade: Any = None
    spec: Mapping[str, Any] = field(default_factory=dict)

    def call(self, rollout: Rollout, move: Any) -> tuple[CallResult, str]:
        """Make a call, and return its result with what the policy sees of it."""
        if self.kind == "shell":
            result = rollout.exec(move)
            return result, f"{result.exit_code} {result.output}"
        if self.kind == "sql":
            rows = rollout.sql(move)
            return rows, repr((rows.columns, rows.rows, rows.row_count, rows.error))
        answer = rollout.video(move[0], **move[1])
        return answer, repr(answer.content)

    def reward(self, rollout: Rollout, chosen: Sequence[int]) -> tuple[float, list[tuple[CallResult, str]]]:
        """Return a finished rollout's reward, and the calls that were made for it."""
        if self.grade is None:
            wanted = iter(self.goal)
            missing = next(wanted)
            for number in chosen:
                if number == missing:
                    missing = next(wanted, None)
            return float(missing is None), []
        graded = self.call(rollout, self.grade)
        return float(self.goal in graded[1]), [graded]


def tasks(clip: Path, database: Path) -> list[TrainingTask]:
    """Return the tasks.

    Args:
        clip: A video of at least 8 s.
        database: Where the database of the SQL task is made.
    """
    _fill(database)
    build = TrainingTask(
        "build", "shell",
        [
            "ls", "cat config.ini", "sleep 0.2; python3 check.py", "sed -i s/debug/release/ config.ini",
            "sed -i s/8080/80/ config.ini", "sleep 0.4; cat config.ini main.src > out", "rm -f out", "wc -l main.src",
        ],
        "PASS", "sleep 0.2; python3 check.py",
        {"files": {
            "/root/config.ini": "mode=debug\nport=8080\n", "/root/main.src": "print\n" * 40,
            "/root/check.py": "text = open('out').read()\nprint('PASS' if 'release' in text else 'FAIL')\n",
        }},
    )  # fmt: skip
    words = TrainingTask(
        "words", "shell",
        [
            "head -3 words", "sleep 0.3; sort -u words > sorted; wc -l sorted", "tr a-z A-Z < words > upper",
            "sleep 0.2; grep -c . words", "mkdir -p report", "cp sorted report/ && ls report", "rm -rf report",
            "sleep 0.3; python3 --version",
        ],
        "40 report/sorted", "sleep 0.2; wc -l report/sorted",
        {"files": {"/root/words": "".join(f"w{n * 7 % 40}\n" for n in range(200))}},
    )  # fmt: skip
    slow = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 250000) "
        "SELECT count(*), sum(i * price) FROM n JOIN items ON items.id = n.i % 50 + 1"
    )
    shop = TrainingTask(
        "shop", "sql",
        [
            slow, f"{slow} WHERE price > 3", f"{slow} AND items.id > 9", "SELECT count(*) FROM items",
            "UPDATE items SET price = price * 2 WHERE id = 7", "DELETE FROM items WHERE price > 90",
            "INSERT INTO items VALUES (777, 'gift', 0)", f"{slow} WHERE name LIKE 'item 1%'",
        ],
        "[['ok']]",
        "SELECT CASE WHEN (SELECT count(*) FROM items WHERE id = 777) "
        "AND (SELECT price FROM items WHERE id = 7) > 7 THEN 'ok' ELSE 'no' END",
        {"driver": "sqlite", "databases": {"main": {"source": str(database)}}},
    )  # fmt: skip
    look = TrainingTask(
        "look", "video",
        [
            ("load_video", {"name": clip.name}), ("preprocess", {}), ("video_info", {}), ("detect_shots", {}),
            ("get_frame", {"t": 5.0, "exact": True, "max_side": 448}), ("contact_sheet", {"n": 9}),
            ("sample_frames", {"n": 8}), ("audio_profile", {}),
        ],
        [0, 1, 3],
        spec={"driver": "video", "video": {"source": str(clip)}},
    )  # fmt: skip
    return [build, words, shop, look]


def _fill(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price INTEGER)")
        connection.executemany(
            "INSERT INTO items VALUES (?, ?, ?)", [(n, f"item {n}", n % 10 if n != 7 else 7) for n in range(1, 101)]
        )
    connection.close()
