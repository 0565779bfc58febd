"""Rollouts become training data: one line each, whatever the agents' output holds."""

import asyncio
import json
import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from forkpoint import AsyncClient, Client, trajectory_files
from forkpoint.trajectory_files import TrajectoryFileError, lines, write
from proxy.cli.main import app
from proxy.storage.journal_segments import JournalEntry
from proxy.transfer.trajectories import TrajectoryRequest, trajectories
from proxy.tree.rollout import Outcome
from sandboxes.calls import MARKS
from tests.proxy.rig import engine
from tests.proxy.serving import Running, serving
from tests.proxy.transfer.rig import walked


def test_columns_of_marks_are_the_marks_of_calls() -> None:
    """The client names them itself, because it loads no room of the proxy."""
    assert tuple(MARKS) == trajectory_files.MARKS


SEPARATORS = "line\u2028separator\u0085next\x00nul"
PICTURE = b"\x89PNG\xff\xfe"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for number in range(2):
            for command in ("echo one > f", "cat f"):
                answer = running.client.post(
                    f"/t/demo/r/r{number}/shell/exec", json={"command": command},
                    headers={"x-forkpoint-labels": f"run=a,step={number},reward={number / 2},note=x"},
                )  # fmt: skip
                answer.raise_for_status()
        for name, content in (("text", SEPARATORS.encode()), ("picture", PICTURE), ("long", "é".encode() * 100)):
            at = f"/t/hostile/r/x/shell/files/root/{name}"
            running.client.put(at, content=content).raise_for_status()
            running.client.get(at).raise_for_status()
        yield running


def read(proxy: Running, path: str = "trajectories") -> list[Any]:
    body = proxy.client.get(f"/api/v1/{path}").raise_for_status().content
    return [json.loads(line) for line in lines([body])]


def test_total_is_the_number_of_lines(proxy: Running) -> None:
    for path in ("trajectories", "trajectories?label=step=1", "tasks/demo/trajectories?rollout=r0"):
        total = proxy.client.get(f"/api/v1/{path}").headers["x-forkpoint-total"]
        assert int(total) == len(read(proxy, path)) > 0


def client(proxy: Running) -> Client:
    return Client(str(proxy.client.base_url), trust_env=False)


def test_line_has_messages_labels_and_timings(proxy: Running) -> None:
    first, second = read(proxy, "tasks/demo/trajectories")
    assert (first["task"], first["rollout"], first["complete"], first["finished"]) == ("demo", "r0", True, False)
    assert second["labels"] == {"run": "a", "step": 1, "reward": 0.5, "note": "x"}
    assert second["reward"] == 0.5
    request, answer = first["messages"][2:]
    function = request["tool_calls"][0]["function"]
    # Session and time limit are the tool's defaults, which no model wrote.
    assert (function["name"], json.loads(function["arguments"])) == ("shell_exec", {"command": "cat f"})
    assert (answer["tool_call_id"], json.loads(answer["content"])["stdout"]) == (
        request["tool_calls"][0]["id"],
        "one\n",
    )
    assert [call["outcome"] for call in first["calls"] + second["calls"]] == ["miss", "miss", "hit", "hit"]
    assert first["calls"][0]["effect"] == ["files"]
    assert first["calls"][1]["exit_code"] == 0
    totals, seconds = second["totals"], sum(call["tool_s"] for call in second["calls"])
    assert (totals["calls"], totals["hits"], totals["misses"]) == (2, 2, 0)
    assert (totals["executed_s"], totals["saved_s"]) == (0, pytest.approx(seconds))
    assert first["totals"]["executed_s"] == pytest.approx(seconds)


def test_labels_task_and_name_choose_rollouts(proxy: Running) -> None:
    assert [line["rollout"] for line in read(proxy)] == ["r0", "r1", "x"]
    assert [line["rollout"] for line in read(proxy, "trajectories?label=step=1&label=run=a")] == ["r1"]
    assert [line["rollout"] for line in read(proxy, "tasks/demo/trajectories?rollout=r0")] == ["r0"]
    assert proxy.client.get("/api/v1/tasks/absent/trajectories").status_code == 404
    assert proxy.client.get("/api/v1/trajectories?label=run").status_code == 422


def test_any_output_stays_on_its_line(proxy: Running) -> None:
    """Line separators of Unicode and NUL are text; other bytes become base64."""
    (line,) = read(proxy, "tasks/hostile/trajectories")
    answers = [message["content"] for message in line["messages"] if message["role"] == "tool"]
    assert answers[1] == SEPARATORS
    assert b64decode(answers[3]) == PICTURE
    assert [call["encoding"] for call in line["calls"]][3] == "base64"
    uploads = [json.loads(m["tool_calls"][0]["function"]["arguments"]) for m in line["messages"][::2]]
    assert (uploads[0]["body"], b64decode(uploads[2]["body_base64"])) == (SEPARATORS, PICTURE)


def test_lines_may_end_in_any_chunk() -> None:
    chunks = [b'{"a":', b'"x\xe2\x80', b"\xa8\ry", b'"}\n{"b":1}', b"\n", b'{"c":2}\n']
    assert list(lines(chunks)) == [b'{"a":"x\xe2\x80\xa8\ry"}', b'{"b":1}', b'{"c":2}']


def test_long_answers_are_cut_between_characters(proxy: Running) -> None:
    (line,) = read(proxy, "tasks/hostile/trajectories?answer_bytes=101")
    assert line["messages"][-1]["content"] == "é" * 50
    assert [call["truncated"] for call in line["calls"]] == [False] * 4 + [True] * 2


def test_forgotten_calls_make_a_line_incomplete(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.exec("1", "X=1").raise_for_status()
        node = running.exec("1", "cat seed").headers["x-forkpoint-node"]
        running.client.delete(f"/api/v1/tasks/task/nodes/{node}?end_rollouts=true").raise_for_status()
        (line,) = read(running)
    assert (line["complete"], line["messages"], len(line["calls"])) == (False, [], 2)
    assert {(call["outcome"], call["tool"]) for call in line["calls"]} == {("miss", None)}


def test_damaged_answer_is_left_out(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.exec("1", "cat seed").raise_for_status()
        running.exec("1", "X=1").raise_for_status()
        with running.engine.store.database.open_reader() as connection:
            connection.execute("PRAGMA query_only=0")
            connection.execute("UPDATE blobs SET data = x'78' WHERE id = (SELECT MIN(answer) FROM records)")
            connection.commit()
        (line,) = read(running)
    assert (line["complete"], len(line["messages"]), len(line["calls"])) == (False, 2, 2)


def test_token_of_one_task_reads_that_task(tmp_path: Path) -> None:
    own = "fedcba9876543210"
    (tmp_path / "tokens").write_text(f"0123456789abcdef *\n{own} demo\n")
    with serving(tmp_path / "data", token_file=tmp_path / "tokens") as running:
        sent = {"x-forkpoint-token": own}
        running.client.put("/api/v1/tasks/demo", json={"driver": "memory"}, headers=sent).raise_for_status()
        paths = ("tasks/demo/trajectories", "tasks/other/trajectories", "trajectories")
        assert [running.client.get(f"/api/v1/{path}", headers=sent).status_code for path in paths] == [200, 403, 403]


def test_pieces_stay_small_for_long_rollouts(tmp_path: Path) -> None:
    """A rollout of 10,000 calls is written in pieces; none holds more than some hundred kilobytes."""

    async def sizes() -> list[int]:
        async with engine(tmp_path) as running:
            await walked(running, "task", [["cat seed"]])
            running.journal.fold()
            ((rollout, record),) = running.store.database.rows("SELECT rollout, record FROM steps", ())
            steps = [JournalEntry(rollout, turn, record, Outcome.HIT) for turn in range(1, 10_000)]
            running.store.rollouts.fold(steps)
            return [len(piece) for piece in trajectories(running.store.database, TrajectoryRequest(("task",)))]

    pieces = asyncio.run(sizes())
    assert len(pieces) > 10
    assert max(pieces) < 300_000


def test_slow_reader_keeps_no_transaction_open(tmp_path: Path) -> None:
    """After a piece was read, the write-ahead log can be emptied; rollouts that begin later are left out."""

    async def run() -> list[Any]:
        async with engine(tmp_path) as running:
            for name in ("a", "b"):
                await walked(running, name, [["cat seed"]])
            running.journal.fold()
            (record,) = running.store.database.rows("SELECT MIN(record) FROM steps", ())[0]
            ids = [number for (number,) in running.store.database.rows("SELECT id FROM rollouts ORDER BY id", ())]
            for number in ids:
                running.store.rollouts.fold(
                    [JournalEntry(number, turn, record, Outcome.HIT) for turn in range(1, 2500)]
                )
            pieces = trajectories(running.store.database, TrajectoryRequest())
            read = bytearray(next(pieces))
            await walked(running, "later", [["cat seed"]])
            running.journal.fold()
            # Its first column is 1 if a reader was in the way.
            ((busy, _, _),) = running.store.database.rows("PRAGMA wal_checkpoint(TRUNCATE)", ())
            assert busy == 0
            read += b"".join(pieces)
            return [json.loads(line) for line in read.splitlines()]

    written = asyncio.run(run())
    assert [(each["task"], each["complete"], each["totals"]["calls"]) for each in written] == [
        ("a", True, 2500), ("b", True, 2500),
    ]  # fmt: skip


def test_parquet_has_the_rows_of_the_lines(proxy: Running, tmp_path: Path) -> None:
    with client(proxy) as reader:
        reader.save_trajectories(tmp_path / "all.parquet", labels={"run": "a"})
        reader.save_trajectories(tmp_path / "none.parquet", labels={"run": "none"})
        reader.save_trajectories(tmp_path / "all.jsonl", labels={"run": "a"})
    table = parquet.read_table(tmp_path / "all.parquet")
    rows, expected = table.to_pylist(), read(proxy, "trajectories?label=run=a")
    assert [json.loads(row["labels"]) for row in rows] == [line["labels"] for line in expected]
    assert [(row["run"], row["step"], row["epoch"]) for row in rows] == [("a", 0, None), ("a", 1, None)]
    assert [row["calls"] for row in rows] == [line["calls"] for line in expected]
    assert [row["total_saved_s"] for row in rows] == [line["totals"]["saved_s"] for line in expected]
    contents = [[message["content"] for message in row["messages"]] for row in rows]
    assert contents == [[message["content"] for message in line["messages"]] for line in expected]
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0
    assert [json.loads(line) for line in (tmp_path / "all.jsonl").read_bytes().splitlines()] == expected


def test_hugging_face_loads_the_dataset(proxy: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package reads it without a network, also in several files."""
    monkeypatch.setattr(trajectory_files, "_SHARD_BYTES", 1)
    with client(proxy) as reader:
        reader.save_trajectories(tmp_path / "set", "demo")
        with pytest.raises(TrajectoryFileError, match="exists"):
            reader.save_trajectories(tmp_path / "set", "demo")
    assert sorted(path.name for path in (tmp_path / "set" / "data").iterdir()) == [
        "train-00000.parquet", "train-00001.parquet",
    ]  # fmt: skip
    program = (
        "import sys, json, datasets\n"
        "data = datasets.load_dataset(sys.argv[1], split='train')\n"
        "print(json.dumps([[row['rollout'], row['messages'][3]['name'], row['reward']] for row in data]))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program, str(tmp_path / "set")]
    loaded = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout) == [["r0", "shell_exec", 0.0], ["r1", "shell_exec", 0.5]]


def test_clients_yield_trajectories(proxy: Running) -> None:
    with client(proxy) as reader:
        first, second = reader.trajectories("demo", labels={"run": "a"})
    assert (first.rollout, second.reward, len(first.messages)) == ("r0", 0.5, 4)

    async def names() -> list[str]:
        async with AsyncClient(str(proxy.client.base_url), trust_env=False) as reader:
            return [each.rollout async for each in reader.trajectories()]

    assert asyncio.run(names()) == [line["rollout"] for line in read(proxy)]


def test_incomplete_file_never_appears(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b'{"a'
        raise OSError("the disk is full")

    for name in ("a.jsonl", "a.parquet", "a"):
        with pytest.raises(OSError, match="disk is full"):
            write(broken(), tmp_path / name)
    with pytest.raises(TrajectoryFileError, match="Choose one"):
        write([], tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_command_writes_files_and_stdout(proxy: Running, tmp_path: Path) -> None:
    environment = {"FORKPOINT_URL": str(proxy.client.base_url)}
    words = ["trajectories", str(tmp_path / "a.jsonl"), "demo", "--label", "step=1"]
    assert CliRunner().invoke(app, words, env=environment).exit_code == 0
    assert [json.loads(line)["rollout"] for line in (tmp_path / "a.jsonl").read_bytes().splitlines()] == ["r1"]
    shown = CliRunner().invoke(app, ["trajectories", "-", "demo"], env=environment)
    assert [json.loads(line)["rollout"] for line in shown.stdout.splitlines()] == ["r0", "r1"]
    refused = CliRunner().invoke(app, ["trajectories", str(tmp_path / "a.csv")], env=environment)
    assert (refused.exit_code, "Choose one" in refused.output) == (1, True)
