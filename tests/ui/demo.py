"""Rollouts as agents make them, in real sandboxes: what the screenshots show."""

import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.sandboxes.videos import make

MONEY = """def add(a, b):
    return a - b


def total(entries):
    return sum(e["amount"] for e in entries)
"""
REPORT = """from ledger.money import total


def report(entries):
    return f"total: {total(entries):.2f}"
"""
TESTS = """from ledger.money import add, total

assert add(2, 3) == 5, f"add(2, 3) is {add(2, 3)}, not 5"
assert total([{"amount": 2}]) == 2
print("\\033[32m2 passed\\033[0m")
"""
FILES = {
    "/work/ledger/__init__.py": "",
    "/work/ledger/money.py": MONEY,
    "/work/ledger/report.py": REPORT,
    "/work/tests/test_money.py": TESTS,
    "/work/README.md": "# ledger\n\nAdds up what was spent.\n",
}
TEST = "sleep 0.6; PYTHONPATH=. python3 tests/test_money.py"
LOOK = ["ls -R", "cat README.md", "cat ledger/money.py", TEST]
FIX = "sed -i 's/a - b/a + b/' ledger/money.py"
COMMIT = "cat > CHANGES <<'END'\n- add() adds\nEND\nsleep 0.2"
TYPES = "sleep 0.3; sed -i 's/def add(a, b):/def add(a: int, b: int) -> int:/' ledger/money.py"
VENV = "sleep 0.8; mkdir -p .venv/bin && echo 'home = /usr' > .venv/pyvenv.cfg"
LINT = "sleep 0.2; printf '[lint]\\nstrict = yes\\n' > setup.cfg"
DOCS = "echo 'See report.py.' >> README.md"
BUILD = "sleep 0.5; mkdir -p dist; tar cf dist/ledger.tar ledger"
THINKING_S = 0.15
"""Pause of an agent between two calls, so that the pictures show some."""
ROLLOUTS = {
    "policy-a-0": [*LOOK, FIX, TEST, COMMIT, "cat CHANGES"],
    "policy-a-1": [*LOOK, FIX, TEST, TYPES, TEST, COMMIT],
    "policy-a-2": [*LOOK, "cat ledger/report.py", FIX, TEST, COMMIT, "cd ledger", "cat money.py", "cd /work"],
    "policy-a-3": [*LOOK, "echo 'def add(a, b): return b' > ledger/money.py", TEST, "git diff", FIX],
    "policy-b-0": [VENV, *LOOK, FIX, TEST],
    "policy-b-1": [VENV, "grep -rn 'def ' ledger", *LOOK, FIX, TEST, COMMIT, "cd ledger", "pwd"],
    "policy-b-2": [*LOOK, FIX, TEST, TYPES, TEST, "rm -r tests", "ls", "export DEBUG=1", "cd ledger"],
    "policy-b-3": [*LOOK, FIX, TEST, TYPES, TEST, "rm -r tests", "ls", "cd ledger && export DEBUG=1", "env | grep BUG"],
    "policy-c-0": [*LOOK, LINT, FIX, TEST, DOCS, "cat README.md"],
    "policy-c-1": [*LOOK, LINT, FIX, TEST, BUILD, "ls dist", DOCS],
    "policy-c-2": [*LOOK, LINT, "rm setup.cfg", FIX, TEST],
    "policy-c-3": [*LOOK, FIX, TEST, BUILD, "ls dist", COMMIT, "cat CHANGES"],
    "policy-c-4": [*LOOK, FIX, TEST, BUILD, "tar tf dist/ledger.tar", "rm -r dist", "false"],
    "policy-c-5": [VENV, *LOOK, FIX, TEST, LINT, BUILD, DOCS, COMMIT],
    "policy-c-6": [VENV, *LOOK, FIX, TEST, LINT, "cat setup.cfg", "echo '[lint]' > setup.cfg; false", TYPES],
}


STEPS = {"a": 1, "b": 2, "c": 3}
"""The training step of each policy's rollouts; `policy-b-1` is of policy b."""
QUESTIONS = {
    "sql-0": ["SELECT name FROM sqlite_master", "SELECT count(*) FROM entries", "SELECT sum(amount) FROM entries"],
    "sql-1": ["SELECT name FROM sqlite_master", "SELECT * FROM entries LIMIT 5", "SELECT total FROM entries"],
    "sql-2": [
        "SELECT name FROM sqlite_master", "UPDATE entries SET amount = amount * 2 WHERE payer = 'ana'",
        "SELECT payer, sum(amount) FROM entries GROUP BY payer",
    ],
    "sql-3": [
        "SELECT name FROM sqlite_master", "DELETE FROM entries WHERE payer = 'ana'",
        "SELECT payer, sum(amount) FROM entries GROUP BY payer",
    ],
}  # fmt: skip
CLIPS = {
    "clip-0": [("load_video", {"name": "clip.mp4"}), ("preprocess", {})],
    "clip-1": [("load_video", {"name": "clip.mp4"}), ("preprocess", {})],
}


def populate(url: str, driver: str = "local", folder: Path | None = None) -> None:
    """Put tasks, and let their rollouts run: the first alone, the others beside one another.

    Args:
        url: The proxy's base URL.
        driver: Driver of the shell's tasks.
        folder: A folder for a database and a video, which become tasks of their own; None for the shell alone.
    """
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        spec: dict[str, Any] = {"driver": driver, "files": FILES, "workdir": "/work"}
        client.put("/api/v1/tasks/fix-ledger", json=spec).raise_for_status()
        names = list(ROLLOUTS)
        solve(client, names[0])
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: solve(client, name), names[1:]))
        for name in ("policy-a-0", "policy-b-0"):
            client.delete(f"/api/v1/tasks/fix-ledger/rollouts/{name}")
        client.put("/api/v1/tasks/long-chain", json={"driver": driver}).raise_for_status()
        chain = [f"echo {number} >> log" for number in range(24)]
        run(client, "long-chain", "walker-0", [*chain, "wc -l log"])
        run(client, "long-chain", "walker-1", [*chain[:9], "rm log", *chain[9:16]])
        if folder is not None:
            ask_database(client, folder / "ledger.sqlite")
            watch_video(client, folder / "clip.mp4")


def solve(client: httpx.Client, name: str) -> None:
    """Let a rollout of `fix-ledger` run under its labels, and give it a reward: 1 if its tests pass."""
    policy = name.split("-")[1]
    labels = {"run": "grpo-7", "step": str(STEPS[policy]), "group": f"ledger-{policy}"}
    begun = client.post("/api/v1/tasks/fix-ledger/rollouts", json={"rollout": name, "labels": labels})
    begun.raise_for_status()
    commands = ROLLOUTS[name]
    run(client, "fix-ledger", name, commands)
    reward = 1.0 if FIX in commands and commands[-1] not in ("false", FIX) else 0.0
    if "rm -r tests" in commands:
        reward = 0.4
    client.patch(f"/api/v1/tasks/fix-ledger/rollouts/{name}/labels", json={"reward": str(reward)}).raise_for_status()


def ask_database(client: httpx.Client, path: Path) -> None:
    """Make a small database, and let rollouts query and change their own copies of it."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, payer TEXT, amount REAL)")
        rows = [(("ana", "ben", "eve")[number % 3], number * 1.5) for number in range(60)]
        database.executemany("INSERT INTO entries (payer, amount) VALUES (?, ?)", rows)
    database.close()
    spec = {"driver": "sqlite", "databases": {"main": {"source": str(path)}}}
    client.put("/api/v1/tasks/ask-ledger", json=spec).raise_for_status()
    for name, questions in QUESTIONS.items():
        labels = {"run": "grpo-8", "step": "1", "group": "sql"}
        client.post("/api/v1/tasks/ask-ledger/rollouts", json={"rollout": name, "labels": labels}).raise_for_status()
        for question in questions:
            client.post(f"/t/ask-ledger/r/{name}/sql/query", json={"sql": question})


def watch_video(client: httpx.Client, path: Path) -> None:
    """Make a short video, and let rollouts load it."""
    spec = {"driver": "video", "video": {"source": str(make(path))}}
    client.put("/api/v1/tasks/watch-clip", json=spec).raise_for_status()
    for name, calls in CLIPS.items():
        for tool, arguments in calls:
            client.post(f"/t/watch-clip/r/{name}/video/{tool}", json=arguments)


def run(client: httpx.Client, task: str, rollout: str, commands: list[str]) -> None:
    """Make a rollout's calls, with the short pauses of an agent that thinks."""
    for command in commands:
        client.post(f"/t/{task}/r/{rollout}/shell/exec", content=json.dumps({"command": command})).raise_for_status()
        time.sleep(THINKING_S)
