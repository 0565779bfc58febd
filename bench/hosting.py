"""What a sandbox on another member costs, for `bench.cluster`: a call in it, and its restore at states of any size.

The owner has room for one sandbox. While that one is busy, the next one starts on the other member. A restore is an
agent's call at a state, less an equal call in a sandbox that is there already.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.client import Server
from bench.machine import console, median, table
from forkpoint.ephemeral_proxy import ephemeral_proxy

STATES = {
    "empty": ("true > f", 5),
    "10 MB, 600 files": ("mkdir d; for i in $(seq 600); do head -c 17000 /dev/urandom > d/$i; done", 8),
    "100 MB": ("head -c 100M /dev/urandom > large", 12),
    "1 GB": ("head -c 1G /dev/urandom > large", 60),
}
"""The states, each by a command that makes it, and for how many seconds the owner's sandbox is kept busy meanwhile."""
CALLS = {"a call that changes nothing": "echo {}", "a call that writes a file": "echo {} > written"}
HOLD_S = 3600
"""Time limit of a call, in seconds."""


@contextmanager
def hosting_members(dsn: str, secret: str, folder: Path) -> Iterator[Server]:
    """Run an owner with room for one sandbox, and a member named `host` with room for many; yield the owner."""
    common = {
        "cluster": dsn, "cluster_secret": secret, "store": str(folder / "store"), "drivers": ["local"], "hosting": "on",
        "warm_sandboxes": 0, "snapshot_bytes": 8 << 30, "default_spec": {"limits": {"timeout_s": HOLD_S}},
    }  # fmt: skip
    with (
        ephemeral_proxy(folder / "owner", {**common, "node": "owner", "max_sandboxes": 1}) as owner,
        ephemeral_proxy(folder / "host", {**common, "node": "host", "max_sandboxes": 32}),
    ):
        yield Server(owner.url, owner.pid)


def call(owner: Server, task: str, rollout: str, command: str) -> float:
    """Return the seconds that a command took, as its agent sees them."""
    url, began = f"{owner.url}/t/{task}/r/{rollout}/shell/exec", time.perf_counter()
    httpx.post(url, json={"command": command}, timeout=HOLD_S).raise_for_status()
    return time.perf_counter() - began


def require_elsewhere(owner: Server, count: int) -> None:
    items = httpx.get(f"{owner.url}/api/v1/sandboxes", timeout=30).json()["items"]
    found = sum((each["id"] or "").startswith("host/") for each in items)
    assert found >= count, f"{found} sandboxes run on the other member, and not {count}"


@contextmanager
def busy(owner: Server, task: str, rollout: str, seconds: int = 5) -> Iterator[None]:
    """Keep the owner's sandbox busy."""
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(call, owner, task, rollout, f"sleep {seconds}; true > /tmp/held")
        time.sleep(1.0)
        yield
        assert not held.done(), f"what is measured took longer than {seconds} s"
        held.result()


def show_restores(owner: Server) -> None:
    """Compare restores on the other member, with and without the state there, and at the owner."""
    shown = table(
        "A restore, ms more than a call alone", "state", "elsewhere, first", "elsewhere, again", "at the owner"
    )
    with busy(owner, "first-of-all", "1"):
        # The other member prepares its base, once for its life.
        call(owner, "first-of-all", "2", "true")
    for number, (name, (command, seconds)) in enumerate(STATES.items()):
        task = f"restore{number}"
        for rollout in ("maker", "holder", "first", "again", "here"):
            call(owner, task, rollout, command)
        time.sleep(3.0)
        with busy(owner, task, "holder", seconds):
            times = [call(owner, task, rollout, f"echo {rollout} > g") for rollout in ("first", "again")]
            require_elsewhere(owner, 2)
            plain = call(owner, task, "first", "echo plain > g")
        times.append(call(owner, task, "here", "echo here > g"))
        shown.add_row(name, *(f"{(each - plain) * 1000:,.0f}" for each in times))
    console.print(shown)


def show_calls(owner: Server, count: int) -> None:
    """Compare calls in a sandbox at the owner and in one on the other member, one after the other."""
    call(owner, "calls", "owner", "true > f")
    with busy(owner, "calls", "owner"):
        call(owner, "calls", "elsewhere", "true > g")
    require_elsewhere(owner, 1)
    shown = table("A call in a sandbox, ms", "", "at the owner", "elsewhere", "difference")
    with httpx.Client(base_url=owner.url, timeout=60) as client:
        for kind, command in CALLS.items():
            times: dict[str, list[float]] = {"owner": [], "elsewhere": []}
            for number in range(count):
                for rollout, measured in times.items():
                    began = time.perf_counter()
                    sent = {"command": command.replace("{}", f"{rollout}{number}")}
                    client.post(f"/t/calls/r/{rollout}/shell/exec", json=sent).raise_for_status()
                    measured.append((time.perf_counter() - began) * 1000)
            differences = [there - here for here, there in zip(*times.values(), strict=True)]
            shown.add_row(kind, *(f"{median(each):.2f}" for each in (*times.values(), differences)))
    console.print(shown)
