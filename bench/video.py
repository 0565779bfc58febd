"""The cost of videos with and without the cache: `python -m bench.video [--clip FILE]`. Needs ffmpeg, or a clip.

One run on the 180 s clip of `examples/make_clip.py`: preprocess twice from nothing in processes of its own (CPU,
memory, bytes); a group of 8 rollouts that load, prepare and ask, each for itself and through the tree; later tasks on
the same video; and the read tools one by one. Exits with 1 if a promise does not hold.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from bench.machine import console, median, table
from examples.make_clip import make
from forkpoint.ephemeral_proxy import ephemeral_proxy

ROLLOUTS = 8
REPEATS = 7
SETTINGS = {"segment_s": 2.0, "frame_s": 1.0, "max_side": 448}
NAME = "clip.mp4"
READS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("video_info", {}), ("sample_frames", {"n": 8}), ("get_frame", {"t": 61.3}), ("contact_sheet", {"n": 9}),
    ("detect_shots", {}), ("get_subtitles", {"start": 10.0, "end": 70.0}), ("audio_profile", {}),
    ("segment_localization", {"description": "a green meadow", "k": 5}), ("caption_retrieval", {"start": 0, "end": 14}),
    ("visual_question_answering", {"question": "What is drawn on the wall?", "segment": 40}),
    ("object_memory_querying", {"question": "Where is the yellow sun?"}),
)  # fmt: skip
EXACT = ("get_frame", {"t": 61.3, "exact": True})
_faults: list[str] = []


def promise(holds: object, text: str) -> None:
    """Print whether a promise holds."""
    console.print(f"[{'green' if holds else 'red'}]{'holds' if holds else 'DOES NOT HOLD'}[/]  {text}")
    if not holds:
        _faults.append(text)


# -- preprocess alone -------------------------------------------------------------------------------------------------


def prepare(clip: Path, folder: Path) -> None:
    """Preprocess a clip into a folder in this process, and print its cost."""
    from sandboxes.video import passes as preparation  # noqa: PLC0415 - only in this process
    from sandboxes.video import video_file  # noqa: PLC0415 - only in this process

    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in preparation.MeasuringPass(clip, folder, video_file.probe(clip, 1e5), SETTINGS):
        pass
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    files = {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    print(json.dumps({"cpu_s": cpu_s, "resident_mb": after.ru_maxrss / 1024, "files": files}))


def show_preprocess(clip: Path, folder: Path) -> None:
    runs = []
    for number in range(2):
        (target := folder / f"prepared-{number}").mkdir()
        command = [sys.executable, "-m", "bench.video", "--prepare", str(target), "--clip", str(clip)]
        began = time.perf_counter()
        run = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        runs.append(run | {"wall_s": time.perf_counter() - began})
    rows = table("Preprocess from nothing", "run", "CPU", "wall, with start of Python", "largest resident")
    for number, run in enumerate(runs):
        rows.add_row(str(number + 1), f"{run['cpu_s']:.1f} s", f"{run['wall_s']:.1f} s", f"{run['resident_mb']:.0f} MB")
    console.print(rows)
    promise(all(run["cpu_s"] < 10 for run in runs), "less than 10 CPU seconds")
    promise(all(run["resident_mb"] < 300 for run in runs), "less than 300 MB resident")
    promise(runs[0]["files"] == runs[1]["files"], "two runs make the same bytes")


# -- a group ----------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """The answers to a group of rollouts and their durations. tool_s: seconds of tools that were executed."""

    answers: list[list[bytes]] = field(default_factory=list)
    tool_s: float = 0.0
    wall_s: float = 0.0


class Task:
    """A task on the clip in a proxy."""

    def __init__(self, client: httpx.Client, name: str, clip: Path, **more: Any) -> None:
        self._client, self._name = client, name
        spec = {"driver": "video", "video": {"source": {NAME: str(clip)}, **SETTINGS}, **more}
        client.put(f"/api/v1/tasks/{name}", json=spec).raise_for_status()

    def ask(self, rollout: str, tool: str, arguments: dict[str, Any]) -> httpx.Response:
        answer = self._client.post(f"/t/{self._name}/r/{rollout}/video/{tool}", json=arguments)
        return answer.raise_for_status()

    def walk(self, rollout: str, group: Group) -> None:
        """Run a rollout: load, prepare and query the clip."""
        answers = []
        for tool, arguments in (("load_video", {"name": NAME}), ("preprocess", {}), *READS, EXACT):
            answer = self.ask(rollout, tool, arguments)
            answers.append(answer.content)
            group.tool_s += tool_s(answer)
        group.answers.append(answers)

    def group(self, *, at_once: int) -> Group:
        group, began = Group(), time.perf_counter()
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(lambda n: self.walk(f"r{n}", group), range(ROLLOUTS)))
        group.wall_s = time.perf_counter() - began
        return group


def tool_s(answer: httpx.Response) -> float:
    """Return the seconds of the tool in an answer; 0 if another rollout's execution answered."""
    if "stored" not in answer.headers["cache-status"] and "bypass" not in answer.headers["cache-status"]:
        return 0.0
    match = re.search(r"tool;dur=([0-9.]+)", answer.headers["server-timing"])
    assert match is not None
    return float(match[1]) / 1000


@contextmanager
def proxied() -> Iterator[httpx.Client]:
    with ephemeral_proxy() as proxy, httpx.Client(base_url=proxy.url, timeout=600, trust_env=False) as client:
        yield client


def preprocesses(client: httpx.Client) -> int:
    return len(client.get("/api/v1/videos").json()["preprocesses"])


def show_group(clip: Path) -> None:
    with proxied() as client:
        uncached = Task(client, "uncached", clip, cache="never").group(at_once=2)
        promise(preprocesses(client) == ROLLOUTS, "without the cache every rollout prepares for itself")
    with proxied() as client:
        cached = Task(client, "cached", clip).group(at_once=ROLLOUTS)
        once = preprocesses(client)
        began = time.perf_counter()
        same_tree = Task(client, "later", clip)
        hit = [same_tree.ask("a", tool, given) for tool, given in (("load_video", {"name": NAME}), ("preprocess", {}))]
        own_tree = Task(client, "own", clip, share="off")
        ran = [own_tree.ask("a", tool, given) for tool, given in (("load_video", {"name": NAME}), ("preprocess", {}))]
        later_ms = (time.perf_counter() - began) * 1e3
        after = preprocesses(client)
        show_reads(own_tree)
    rows = table(f"Group of {ROLLOUTS} rollouts, {len(READS) + 3} calls each", "", "seconds of tools", "wall")
    rows.add_row("every rollout for itself", f"{uncached.tool_s:.1f} s", f"{uncached.wall_s:.1f} s")
    rows.add_row("through the tree", f"{cached.tool_s:.2f} s", f"{cached.wall_s:.1f} s")
    rows.add_row("share", f"1/{uncached.tool_s / cached.tool_s:.1f}", f"1/{uncached.wall_s / cached.wall_s:.1f}")
    console.print(rows)
    promise(cached.tool_s <= uncached.tool_s / 5, "at most a fifth of the seconds of tools")
    promise(once == 1, "decoded and prepared once")
    promise(all("hit" in answer.headers["cache-status"] for answer in hit), "a later task is answered from the tree")
    own_ms = sum(tool_s(answer) for answer in ran) * 1e3
    promise(after == 1 and own_ms < 100, f"one with a tree of its own finds all prepared: {own_ms:.0f} ms of tools")
    console.print(f"both later tasks, PUT and four calls: {later_ms:.0f} ms")
    different = {str(answers) for answers in (*cached.answers, *uncached.answers)}
    promise(len(different) == 1, f"all {2 * ROLLOUTS} rollouts got the same bytes of every tool")


def show_reads(task: Task) -> None:
    rows = table("Reading tools without a model, each call another one", "tool", "tool", "request to answer")
    slow = []
    for tool, arguments in (*READS, EXACT):
        tools, whole = [], []
        for number in range(REPEATS + 1):
            began = time.perf_counter()
            answer = task.ask("a", tool, varied(tool, arguments, number))
            whole.append((time.perf_counter() - began) * 1e3)
            tools.append(tool_s(answer) * 1e3)
        # The first call of each kind opens files. `video_info` has no arguments, so all but its first call are hits.
        if tool == "video_info":
            tools, whole = tools[:1] * 2, whole[:1] * 2
        name = tool + (", exact" if arguments.get("exact") else "")
        rows.add_row(name, f"{median(tools[1:]):.1f} ms", f"{median(whole[1:]):.1f} ms")
        if median(tools[1:]) >= 20 and not arguments.get("exact"):
            slow.append(name)
    console.print(rows)
    promise(not slow, f"less than 20 ms each, those that decode again (`exact`) aside {slow or ''}")


def varied(tool: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """Return arguments that no earlier call had."""
    changed = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, float):
            changed[name] = value + 0.37 * (number + 1)
        elif isinstance(value, str):
            changed[name] = f"{value} {number}"
        elif isinstance(value, int) and not isinstance(value, bool):
            changed[name] = value + number + 1 if name != "n" else value
    spans = {"sample_frames", "contact_sheet", "detect_shots", "audio_profile"}
    if tool in spans and not any(changed[name] != arguments[name] for name in arguments):
        changed |= {"threshold": 0.2 + number / 50} if tool == "detect_shots" else {"start": 0.5 + number}
    return changed


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clip", type=Path, help="clip to use instead of the synthetic one")
    parser.add_argument("--prepare", type=Path, help="preprocess the clip into this folder, and print the cost")
    options = parser.parse_args()
    if options.prepare is not None:
        prepare(options.clip, options.prepare)
        return
    os.environ["FORKPOINT_DRIVERS"] = '["video"]'
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-") as name:
        folder = Path(name)
        clip = options.clip
        if clip is None:
            make(clip := folder / NAME)
        show_preprocess(clip, folder)
        show_group(clip)
    sys.exit(1 if _faults else 0)


if __name__ == "__main__":
    main()
