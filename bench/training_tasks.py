"""The tasks of `bench.training`: shell, SQL and video, whose calls a policy writes word by word.

Most calls that can be written are of no use, and some fail. Three of them in the right order are the goal, and each is
rewarded. Tools wait as long as tools of their kind do: a build or a test run waits for 0.2 to 0.4 s, and a slow query
counts for about 0.1 s.

The tools of `steady` tasks are deterministic, so two runs can be compared call by call. Statements of the `noisy` task
answer and write random numbers, and whether they reach a goal is up to chance.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.policy import Slots
from forkpoint.client import Rollout
from forkpoint.results import CallResult

TURNS = 4


@dataclass(frozen=True)
class TrainingTask:
    """A task of the benchmark.

    Attributes:
        kind: `shell`, `sql` or `video`: which endpoint its calls go to.
        slots: The words of its calls: a command, a statement, or a video tool's name with a time.
        goals: What the output of `grade` is to contain; for video, beginnings of calls, to be made in this order.
        grade: The call that follows the last turn; None for video.
        spec: Its environment.
    """

    name: str
    kind: str
    slots: Slots
    goals: Sequence[str]
    grade: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)

    def call(self, rollout: Rollout, text: str) -> tuple[CallResult, str]:
        """Make a call, and return its result with what the policy reads of it."""
        if self.kind == "shell":
            result = rollout.exec(text)
            return result, f"{result.exit_code} {result.output}"
        if self.kind == "sql":
            rows = rollout.sql(text)
            return rows, repr((rows.columns, rows.rows, rows.row_count, rows.error))
        tool, time_s = text.split()
        arguments: dict[str, dict[str, Any]] = {
            "load_video": {"name": "clip.mp4"}, "get_frame": {"t": float(time_s), "exact": True}
        }  # fmt: skip
        answer = rollout.video(tool, **arguments.get(tool, {}))
        return answer, repr(answer.content)

    def reward(self, calls: Sequence[str], graded: str) -> float:
        """Return the share of the goals that a rollout has reached; graded: the output of `grade`."""
        if self.grade is not None:
            return sum(goal in graded for goal in self.goals) / len(self.goals)
        reached = 0
        for call in calls:
            reached += reached < len(self.goals) and call.startswith(self.goals[reached])
        return reached / len(self.goals)


def steady(clip: Path, database: Path) -> list[TrainingTask]:
    """Return the tasks whose tools are deterministic.

    Args:
        clip: A video of at least 8 s, named clip.mp4.
        database: Where the database of the SQL task is made.
    """
    fill(database)
    build = TrainingTask(
        "build", "shell",
        [
            ["cat", "wc -l", "sed -i s/debug/release/", "sed -i s/8080/80/", "rm -f",
             "sleep 0.4; cat config.ini main.src >"],
            ["config.ini", "main.src", "out", "notes", ".", "missing"],
        ],
        ["mode=release", "port=80", "linked"],
        "sleep 0.2; grep -sx mode=release config.ini; grep -sx port=80 config.ini; "
        "grep -sqx mode=release out && grep -sqx port=80 out && echo linked",
        {"files": {"/root/config.ini": "mode=debug\nport=8080\n", "/root/main.src": "print\n" * 40}},
    )  # fmt: skip
    words = TrainingTask(
        "words", "shell",
        [
            ["head -3", "sleep 0.2; grep -c .", "mkdir -p", "rm -rf", "sleep 0.3; sort -u words >",
             "sleep 0.3; tr w W < words >"],
            ["words", "report", "report/sorted", "report/upper", "sorted", "upper"],
        ],
        ["made", "sorted", "upper"],
        "sleep 0.2; test -d report && echo made; test $(cat report/sorted | wc -l) = 40 && echo sorted; "
        "grep -sq W report/upper && echo upper",
        {"files": {"/root/words": "".join(f"w{n * 7 % 40}\n" for n in range(200))}},
    )  # fmt: skip
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 250000)"
    joined = "FROM n JOIN items ON items.id = n.i % 50 + 1"
    shop = TrainingTask(
        "shop", "sql",
        [
            [f"{numbers} SELECT count(*), sum(i * price) {joined}", f"{numbers} SELECT count(*), avg(price) {joined}",
             f"{numbers} SELECT max(i), min(name) {joined}", "UPDATE items SET price = price * 2", "DELETE FROM items",
             "INSERT INTO items SELECT id + 1000, name, price FROM items"],
            _WHERE,
        ],
        ["'gone'", "'dear'", "'copied'"],
        # Item 7 is deleted too if its price has been doubled before.
        f"{numbers} SELECT {_GONE}, CASE WHEN (SELECT price FROM items WHERE id = 7) = 14 THEN 'dear' END AS b, "
        f"{_COPIED}, sum(i * price) AS d {joined}",
        {"driver": "sqlite", "databases": {"main": {"source": str(database)}}},
    )  # fmt: skip
    look = TrainingTask(
        "look", "video",
        [
            ["load_video", "preprocess", "video_info", "detect_shots", "get_frame", "contact_sheet", "audio_profile"],
            ["1.0", "3.0", "5.0", "7.0"],
        ],
        ["load_video", "preprocess", "get_frame 5.0"],
        spec={"driver": "video", "video": {"source": str(clip)}},
    )  # fmt: skip
    return [build, words, shop, look]


def noisy(database: Path) -> list[TrainingTask]:
    """Return the task whose tool is not deterministic; database: as in `steady`."""
    fill(database)
    draw = TrainingTask(
        "draw", "sql",
        [
            ["SELECT random()", "SELECT random(), count(*) FROM items", "UPDATE items SET price = abs(random()) % 10",
             "DELETE FROM items", "INSERT INTO items SELECT id + 1000, name, random() FROM items",
             "SELECT sum(price) FROM items"],
            _WHERE,
        ],
        ["'gone'", "'cheap'", "'copied'"],
        f"SELECT {_GONE}, CASE WHEN (SELECT price FROM items WHERE id = 7) < 7 THEN 'cheap' END AS b, {_COPIED}, "
        "random() AS d",
        {"driver": "sqlite", "databases": {"main": {"source": str(database)}}},
    )  # fmt: skip
    return [draw]


_WHERE = ["WHERE true", "WHERE id = 7", "WHERE price > 8", "WHERE id > 90", "WHERE name LIKE 'item 1%'", "LIMIT 3"]
_GONE = (
    "CASE WHEN (SELECT count(*) FROM items WHERE id <= 100) = 90 "
    "AND NOT EXISTS (SELECT 1 FROM items WHERE price = 9 AND id <> 7) THEN 'gone' END AS a"
)
_COPIED = "CASE WHEN EXISTS (SELECT 1 FROM items WHERE id = 1007) THEN 'copied' END AS c"


def fill(database: Path) -> None:
    """Make the database of items: 100 rows with prices from 0 to 9."""
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price INTEGER)")
        connection.executemany("INSERT INTO items VALUES (?, ?, ?)", [(n, f"item {n}", n % 10) for n in range(1, 101)])
    connection.close()
