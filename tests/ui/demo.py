"""Rollouts as agents make them, in real sandboxes: what the screenshots show."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

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
ROLLOUTS = {
    "policy-a-0": [*LOOK, FIX, TEST, COMMIT, "cat CHANGES"],
    "policy-a-1": [*LOOK, FIX, TEST, TYPES, TEST, COMMIT],
    "policy-a-2": [*LOOK, "cat ledger/report.py", FIX, TEST, COMMIT],
    "policy-a-3": [*LOOK, "echo 'def add(a, b): return b' > ledger/money.py", TEST, "git diff", FIX],
    "policy-b-0": [VENV, *LOOK, FIX, TEST],
    "policy-b-1": [VENV, "grep -rn 'def ' ledger", *LOOK, FIX, TEST, COMMIT, "cd ledger", "pwd"],
    "policy-b-2": [*LOOK, FIX, TEST, TYPES, TEST, "rm -r tests", "ls"],
    "policy-b-3": [*LOOK, FIX, TEST, TYPES, TEST, "rm -r tests", "ls", "cd ledger && export DEBUG=1", "env | grep BUG"],
    "policy-c-0": [*LOOK, LINT, FIX, TEST, DOCS, "cat README.md"],
    "policy-c-1": [*LOOK, LINT, FIX, TEST, BUILD, "ls dist", DOCS],
    "policy-c-2": [*LOOK, LINT, "rm setup.cfg", FIX, TEST],
    "policy-c-3": [*LOOK, FIX, TEST, BUILD, "ls dist", COMMIT, "cat CHANGES"],
    "policy-c-4": [*LOOK, FIX, TEST, BUILD, "tar tf dist/ledger.tar", "rm -r dist", "false"],
    "policy-c-5": [VENV, *LOOK, FIX, TEST, LINT, BUILD, DOCS, COMMIT],
    "policy-c-6": [VENV, *LOOK, FIX, TEST, LINT, "cat setup.cfg", "echo '[lint]' > setup.cfg; false", TYPES],
}


def populate(url: str, driver: str = "local") -> None:
    """Put two tasks, and let their rollouts run: the first alone, the others beside one another."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        spec: dict[str, Any] = {"driver": driver, "files": FILES, "workdir": "/work"}
        client.put("/api/v1/tasks/fix-ledger", json=spec).raise_for_status()
        names = list(ROLLOUTS)
        run(client, "fix-ledger", names[0], ROLLOUTS[names[0]])
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: run(client, "fix-ledger", name, ROLLOUTS[name]), names[1:]))
        for name in ("policy-a-0", "policy-b-0"):
            client.delete(f"/api/v1/tasks/fix-ledger/rollouts/{name}")
        client.put("/api/v1/tasks/long-chain", json={"driver": driver}).raise_for_status()
        chain = [f"echo {number} >> log" for number in range(24)]
        run(client, "long-chain", "walker-0", [*chain, "wc -l log"])
        run(client, "long-chain", "walker-1", [*chain[:9], "rm log", *chain[9:16]])


def run(client: httpx.Client, task: str, rollout: str, commands: list[str]) -> None:
    for command in commands:
        client.post(f"/t/{task}/r/{rollout}/shell/exec", content=json.dumps({"command": command})).raise_for_status()
