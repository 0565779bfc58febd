"""Tokens, and what each token may see."""

import json
import socket
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from structlog.testing import LogCapture
from typer.testing import CliRunner
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from proxy.cli.main import app
from proxy.http.access import ALL, Access, AccessError, Grant, configured_access, read_tokens
from proxy.names import is_loopback
from proxy.refusals import RefusalError
from proxy.settings import Settings
from sandboxes.sqlite.driver import SqliteDriver
from tests.proxy.dialects.test_sql_endpoint import make
from tests.proxy.serving import Running, serving

ROOT, ALICE, BOB = "root-token-0123456789", "alice-token-012345678", "bobby-token-012345678"
BODY = json.dumps({"command": "echo 1 > f"}).encode()


@pytest.fixture(scope="module")
def closed_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    file = data / "tokens"
    file.write_text(f"# who may what\n\n{ALICE} alice-* shared\n{BOB}  bob-*\n")
    settings: dict[str, Any] = {"token": SecretStr(ROOT), "token_file": file, "sources": (str(shared_folder(data)),)}
    rules = Settings(data=data, **settings).source_rules
    with serving(data, drivers={"sqlite": SqliteDriver(data / "sqlite", rules)}, **settings) as up:
        yield up


def shared_folder(data: Path) -> Path:
    """Return the directory whose files all tenants may name."""
    folder = data.with_name(f"{data.name}-shared")
    folder.mkdir(exist_ok=True)
    return folder


def sqlite(source: Path) -> dict[str, Any]:
    return {"driver": "sqlite", "databases": {"shop": {"source": str(source)}}}


def respond(proxy: Running, method: str, path: str, token: str = "", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return proxy.client.request(method, path, headers={**headers, **more.pop("headers", {})}, **more)


def raw(proxy: Running, *lines: str, body: bytes = BODY) -> tuple[int, str]:
    """Send a request as it is written, all in one packet as the way of a hit has it; return its status and body."""
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(head + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode()


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/tasks",
        "/api/v1/stats",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/t/alice-x/r/r/shell/exec",
        "/api/v1/events",
    ],
)
def test_requests_without_a_token_are_refused(closed_proxy: Running, path: str) -> None:
    for token in ("", "wrong-token-01234567890", "ä"):
        headers = {b"authorization": f"Bearer {token}".encode()} if token else {}
        answer = closed_proxy.client.request(
            "POST" if path.startswith("/t/") else "GET", path, headers=headers, content=BODY
        )
        assert (answer.status_code, answer.json()["type"]) == (401, "urn:forkpoint:token")
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(("token", "status", "code"), [("", 401, "unauthenticated"), (BOB, 403, "permission_denied")])
def test_refusal_has_the_form_of_its_protocol(closed_proxy: Running, token: str, status: int, code: str) -> None:
    base = "/t/alice-1/r/a"
    ours = respond(closed_proxy, "POST", f"{base}/shell/exec", token, content=BODY)
    assert (ours.status_code, ours.headers["content-type"]) == (status, "application/problem+json")
    why = ours.json()["detail"]
    docker = respond(closed_proxy, "GET", f"{base}/docker/v1.43/containers/json", token)
    assert (docker.status_code, docker.json()) == (status, {"message": why})
    control = respond(closed_proxy, "POST", f"{base}/e2b/v2/sandboxes", token, json={})
    assert (control.status_code, control.json()) == (status, {"code": status, "message": why})
    listed = respond(closed_proxy, "POST", f"{base}/e2b/process.Process/List", token, json={})
    assert (listed.status_code, listed.json()) == (status, {"code": code, "message": why})
    streams = {"content-type": "application/connect+json"}
    started = respond(closed_proxy, "POST", f"{base}/e2b/process.Process/Start", token, content=b"", headers=streams)
    assert (started.status_code, json.loads(started.content[5:])["error"]) == (200, {"code": code, "message": why})
    mcp = respond(closed_proxy, "POST", f"{base}/mcp", token, json={})
    assert (mcp.status_code, "www-authenticate" in mcp.headers) == (status, status == 401)


def test_health_needs_no_token(closed_proxy: Running) -> None:
    for path in ("/healthz", "/readyz"):
        assert respond(closed_proxy, "GET", path).status_code == 200
    assert respond(closed_proxy, "GET", "/ui/").status_code == 200


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-forkpoint-token"])
def test_token_is_taken_from_every_header(closed_proxy: Running, header: str) -> None:
    value = f"Bearer {ROOT}" if header == "authorization" else ROOT
    for _ in range(2):
        answer = closed_proxy.client.post("/t/tok/r/r/shell/exec", content=BODY, headers={header: value})
        assert answer.status_code == 200
    # Twice as one packet: the second rollout's call is known, and answered where it was read.
    status, body = raw(
        closed_proxy, f"POST /t/tok/r/{header}/shell/exec HTTP/1.1", "Host: 127.0.0.1", f"{header}: {value}"
    )
    assert (status, json.loads(body)["exit_code"]) == (200, 0)
    status, _ = raw(closed_proxy, f"POST /t/tok/r/{header}/shell/exec HTTP/1.1", "Host: 127.0.0.1")
    assert status == 401


def test_token_sees_only_its_own_tasks(closed_proxy: Running) -> None:
    for token, task in ((ALICE, "alice-1"), (BOB, "bob-1"), (ROOT, "root-1")):
        assert respond(closed_proxy, "POST", f"/t/{task}/r/r/shell/exec", token, content=BODY).status_code == 200
    for token, task in ((ALICE, "bob-1"), (BOB, "alice-1"), (ALICE, "root-1"), (ALICE, "alic")):
        for method, path in (
            ("POST", f"/t/{task}/r/r/shell/exec"), ("GET", f"/api/v1/tasks/{task}"), ("PUT", f"/api/v1/tasks/{task}"),
            ("GET", f"/api/v1/tasks/{task}/export"), ("DELETE", f"/api/v1/tasks/{task}"),
        ):  # fmt: skip
            answer = respond(closed_proxy, method, path, token, content=BODY)
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:forkpoint:hidden")
    by_header = {"x-forkpoint-task": "bob-1", "x-forkpoint-rollout": "r"}
    assert respond(closed_proxy, "POST", "/e/shell/exec", ALICE, content=BODY, headers=by_header).status_code == 403
    seen = {
        token: {task["task"] for task in respond(closed_proxy, "GET", "/api/v1/tasks", token).json()["items"]}
        for token in (ALICE, BOB, ROOT)
    }
    assert seen[ALICE] == {"alice-1"}
    assert seen[BOB] == {"bob-1"}
    assert seen[ROOT] >= {"alice-1", "bob-1", "root-1"}
    for path in ("snapshots", "sandboxes"):
        tasks = {entry["task"] for entry in respond(closed_proxy, "GET", f"/api/v1/{path}", ALICE).json()["items"]}
        assert tasks <= {"alice-1"}
    for path in (
        "/api/v1/stats", "/metrics", "/api/v1/timeline", "/api/v1/events", "/api/v1/videos", "/v1.43/info",
        "/api/v1/system/settings", "/api/v1/system/warnings",
    ):  # fmt: skip
        assert respond(closed_proxy, "GET", path, ALICE).status_code == 403
    assert respond(closed_proxy, "GET", "/api/v1/events?task=bob-1", ALICE).status_code == 403


def test_rollout_token_opens_only_that_rollout(closed_proxy: Running) -> None:
    begun = respond(closed_proxy, "POST", "/api/v1/tasks/alice-2/rollouts", ALICE, json={"rollout": "r"}).json()
    own = begun["token"]
    assert respond(closed_proxy, "POST", "/e/shell/exec", own, content=BODY).status_code == 200
    assert respond(closed_proxy, "POST", "/t/alice-2/r/r/shell/exec", own, content=BODY).status_code == 200
    for path in ("/t/alice-2/r/other/shell/exec", "/t/alice-1/r/r/shell/exec"):
        assert respond(closed_proxy, "POST", path, own, content=BODY).status_code == 401
    assert respond(closed_proxy, "GET", "/api/v1/tasks/alice-2", own).status_code == 401


def test_tasks_of_different_tokens_share_no_tree(closed_proxy: Running) -> None:
    spec = sqlite(make(shared_folder(closed_proxy.engine.settings.data) / "shop.db"))
    statuses = []
    for token, task in ((ALICE, "alice-sql"), (ALICE, "shared"), (BOB, "bob-sql")):
        assert respond(closed_proxy, "PUT", f"/api/v1/tasks/{task}", token, json=spec).status_code == 201
        answer = respond(closed_proxy, "POST", f"/t/{task}/r/r/sql/query", token, json={"sql": "SELECT 1"})
        statuses.append(answer.headers["cache-status"])
    assert statuses == ["forkpoint; fwd=miss; stored", "forkpoint; hit", "forkpoint; fwd=miss; stored"]


def test_terminal_needs_a_token(closed_proxy: Running) -> None:
    host, port = closed_proxy.address
    with pytest.raises(InvalidStatus):
        connect(f"ws://{host}:{port}/api/v1/tasks/alice-1/nodes/n1/terminal")
    headers = {"x-forkpoint-token": ALICE}
    with connect(f"ws://{host}:{port}/api/v1/tasks/alice-1/nodes/n999/terminal", additional_headers=headers) as socket_:
        assert json.loads(socket_.recv())["type"] == "urn:forkpoint:no-such-node"
    offered = [Subprotocol("forkpoint"), Subprotocol(f"token.{ALICE}")]
    url = f"ws://{host}:{port}/api/v1/tasks/alice-1/nodes/n999/terminal"
    with connect(url, subprotocols=offered, origin=Origin(f"http://{host}:{port}")) as socket_:
        assert socket_.subprotocol == "forkpoint"
        assert json.loads(socket_.recv())["type"] == "urn:forkpoint:no-such-node"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("short", "16 to 200"),
        (f"{ROOT}\n{ROOT} x-*", "twice"),
        ("# nothing\n", "no token"),
        ("with spaces ä", "16 to 200"),
    ],
)
def test_malformed_tokens_are_refused_and_not_shown(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(AccessError, match=says) as refused:
        read_tokens(None, file)
    assert "short" not in str(refused.value)
    with pytest.raises(AccessError, match="cannot be read"):
        read_tokens(None, tmp_path / "nowhere")


def test_token_file_may_hold_digests(tmp_path: Path) -> None:
    """A file of digests is no secret: none of its lines is a token."""
    file, digest = tmp_path / "tokens", sha256(ALICE.encode()).hexdigest()
    file.write_text(f"sha256:{digest} alice-*\n{BOB} bob-*\n")
    access = Access(read_tokens(None, file))
    assert access.grant_of(ALICE) == Grant(("alice-*",))
    assert access.grant_of(BOB) == Grant(("bob-*",))
    assert [access.grant_of(wrong) for wrong in (digest, f"sha256:{digest}", digest.upper())] == [None] * 3
    for text, says in ((f"{ALICE}\nsha256:{digest.upper()}", "twice"), ("sha256:12", "64 hexadecimal")):
        file.write_text(text)
        with pytest.raises(AccessError, match=says):
            read_tokens(None, file)


@pytest.mark.parametrize(
    ("header", "value"),
    [(b"authorization", f"Bearer {BOB}"), (b"x-api-key", BOB), (b"x-forkpoint-token", BOB), (b"x-other", f"a {BOB} b")],
)
def test_admitted_request_has_no_token_left(tmp_path: Path, header: bytes, value: str) -> None:
    """What is behind the door records headers and sends them on."""
    (tmp_path / "tokens").write_text(f"{BOB} bob-*\n")
    kept = (b"host", b"localhost")
    sent = [kept, (b"x-api-key", BOB.encode()), (b"x-forkpoint-token", b"another"), (header, value.encode())]
    scope = {"path": "/t/bob-1/r/r/shell/exec", "headers": sent, "subprotocols": ["chat", f"forkpoint.{BOB}"]}
    Access(read_tokens(None, tmp_path / "tokens")).admit(scope, lambda _: None)
    assert (scope["headers"], scope["subprotocols"]) == ([kept], ["chat"])


def test_changed_token_file_needs_no_restart(tmp_path: Path) -> None:
    """A new token is known at the next request, a revoked one unknown; a file that cannot be used changes nothing."""
    file = tmp_path / "tokens"
    run = partial(CliRunner().invoke, app, env={"FORKPOINT_TOKEN_FILE": str(file)})
    alice = run(["token", "create", "alice", "--tasks", "alice-*"]).stdout.strip()
    access = configured_access(None, file)

    def admitted(token: str) -> Grant | None:
        headers = [(b"x-forkpoint-token", token.encode())]
        try:
            return access.admit({"path": "/api/v1/tasks", "headers": headers}, lambda _: None)
        except RefusalError:
            return None

    assert admitted(alice) == Grant(("alice-*",), name="alice")
    bob = json.loads(run(["token", "create", "bob", "--json"]).stdout)["token"]
    assert (admitted(bob), admitted(alice)) == (Grant(name="bob"), Grant(("alice-*",), name="alice"))
    assert json.loads(run(["token", "list", "--json"]).stdout) == [
        {"name": "alice", "tasks": ["alice-*"], "disk": None}, {"name": "bob", "tasks": [], "disk": None},
    ]  # fmt: skip
    assert run(["token", "create", "bob"]).exit_code == 1
    assert (alice in file.read_text(), file.stat().st_mode & 0o777) == (False, 0o600)
    assert run(["token", "revoke", "alice"]).exit_code == 0
    assert (admitted(alice), admitted(bob)) == (None, Grant(name="bob"))
    file.write_text(f"{file.read_text()}short\n")
    assert admitted(bob) == Grant(name="bob")
    file.write_text("# nobody\n")
    # Never open to all: with the last token revoked, every request is refused.
    assert (admitted(bob), admitted(""), access.needs_token) == (None, None, True)


def test_rollouts_have_the_name_of_their_token(tmp_path: Path) -> None:
    """So `report --by owner` says what each person used. A client cannot name another owner."""
    file = tmp_path / "tokens"
    file.write_text(f"{ALICE} @alice alice-*\n{BOB} @bob\n")
    with serving(tmp_path / "data", token_file=file) as running:
        labels = {"x-forkpoint-labels": "owner=bob,run=r7"}
        called = running.client.post(
            "/t/alice-1/r/1/shell/exec", json={"command": "true"}, headers={**labels, "x-forkpoint-token": ALICE}
        )
        assert called.is_success
        rollouts = "/api/v1/tasks/alice-1/rollouts"
        begun = respond(running, "POST", rollouts, BOB, json={"rollout": "2", "labels": {"owner": "alice"}})
        assert begun.json()["labels"] == {"owner": "bob"}
        changed = respond(running, "PATCH", f"{rollouts}/1/labels", BOB, json={"owner": "bob", "reward": 1})
        assert changed.status_code == 403
        listed = respond(running, "GET", rollouts, ALICE).json()["items"]
        assert {each["rollout"]: each["labels"]["owner"] for each in listed} == {"1": "alice", "2": "bob"}


def test_log_lines_name_the_token(tmp_path: Path) -> None:
    """A call's lines have the name of its token, and never the token."""
    file, lines = tmp_path / "tokens", LogCapture()
    file.write_text(f"{ALICE} @alice alice-*\n{BOB}\n")
    structlog.configure([structlog.contextvars.merge_contextvars, lines], structlog.make_filtering_bound_logger(0))
    try:
        with serving(tmp_path / "data", token_file=file) as running:
            for token, task in ((ALICE, "alice-1"), (BOB, "bob-1")):
                assert respond(running, "POST", f"/t/{task}/r/r/shell/exec", token, content=BODY).is_success
    finally:
        structlog.reset_defaults()
    answered = {line["task"]: line.get("token") for line in lines.entries if line["event"] == "answered"}
    assert answered == {"alice-1": "alice", "bob-1": None}
    assert ALICE not in repr(lines.entries)


def test_owner_has_a_limit_of_kept_states(tmp_path: Path) -> None:
    """`token create --disk` bounds what the states of its tasks take; the report by owner shows both."""
    file = tmp_path / "tokens"
    run = partial(CliRunner().invoke, app, env={"FORKPOINT_TOKEN_FILE": str(file)})
    refused = [["--disk", "10G"], ["--disk", "much", "--tasks", "a-*"], ["--disk", "1 G", "--tasks", "a-*"]]
    refused += [["--tasks", "disk=1G"]]
    assert [run(["token", "create", "alice", *options]).exit_code for options in refused] == [1, 1, 1, 1]
    created = run(["token", "create", "alice", "--disk", "10B", "--tasks", "alice-*"])
    carol = run(["token", "create", "carol", "--tasks", "c-*"]).stdout.strip()
    assert "at most 10B of kept states" in run(["token", "list"]).stdout
    boss = run(["token", "create", "boss"]).stdout.strip()
    with serving(tmp_path / "data", token_file=file) as running:
        for token, task in ((created.stdout.strip(), "alice-1"), (carol, "c-1")):
            command = {"command": "echo 1 > f"}
            assert respond(running, "POST", f"/t/{task}/r/1/shell/exec", token, json=command).is_success
            node = respond(running, "GET", f"/api/v1/tasks/{task}/rollouts/1", token).json()["node"]
            pinned = respond(running, "POST", f"/api/v1/tasks/{task}/nodes/{node}/pin", token)
            assert pinned.is_success, pinned.text
        rows = respond(running, "GET", "/api/v1/report?by=owner", boss).json()["rows"]
        owned = {row["group"]: (row["kept_bytes"] or 0, row["disk_bytes"]) for row in rows}
        assert (owned["alice"][1], owned["carol"][1]) == (10, None)
        assert min(owned["alice"][0], owned["carol"][0]) > 10


def test_rollout_token_is_shown_once(closed_proxy: Running) -> None:
    """The response that begins a rollout shows its token; lists and views of it do not."""
    base = "/api/v1/tasks/alice-once/rollouts"
    begun = respond(closed_proxy, "POST", base, ALICE, json={"rollout": "r"}).json()
    forked = respond(closed_proxy, "POST", f"{base}/r/fork", ALICE, json={"name": "f"}).json()
    assert begun["token"].startswith("fp_")
    assert forked["token"].startswith("fp_")
    assert {view["token"] for view in respond(closed_proxy, "GET", base, ALICE).json()["items"]} == {None}
    assert respond(closed_proxy, "GET", f"{base}/r", ALICE).json()["token"] is None


def test_specs_of_tokens_for_some_tasks_are_confined(closed_proxy: Running, tmp_path: Path) -> None:
    """Such a token reads neither other tenants' files nor the proxy's own; the operator names what it likes."""
    data = closed_proxy.engine.settings.data
    allowed, elsewhere = make(shared_folder(data) / "mine.db"), make(tmp_path / "shop.db")
    for token, task, source, status in (
        (ALICE, "alice-src", elsewhere, 403), (ALICE, "alice-src", data / "tokens", 403),
        (ROOT, "root-src", data / "tokens", 403), (ROOT, "root-src", data / "forkpoint.sqlite", 403),
        (ROOT, "root-src", elsewhere, 201), (ALICE, "alice-src", allowed, 201),
    ):  # fmt: skip
        answer = respond(closed_proxy, "PUT", f"/api/v1/tasks/{task}", token, json=sqlite(source) | {"confined": False})
        assert answer.status_code == status, (answer.text, source)
        assert status == 201 or answer.json()["type"] == "urn:forkpoint:source"
        assert status == 403 or answer.json()["spec"]["confined"] is (token is ALICE)
    query = {"sql": "SELECT COUNT(*) FROM sqlite_master"}
    assert respond(closed_proxy, "POST", "/t/alice-src/r/r/sql/query", ALICE, json=query).status_code == 200
    allowed.unlink()
    allowed.symlink_to(elsewhere)
    answer = respond(closed_proxy, "PUT", "/api/v1/tasks/alice-src", ALICE, json=sqlite(allowed))
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:forkpoint:source")


def test_imported_environments_are_confined(closed_proxy: Running, tmp_path: Path) -> None:
    """A bundle is a spec too."""
    spec = sqlite(make(tmp_path / "shop.db")) | {"limits": {"pids": 99}}
    assert respond(closed_proxy, "PUT", "/api/v1/tasks/exported", ROOT, json=spec).status_code == 201
    bundle = respond(closed_proxy, "GET", "/api/v1/tasks/exported/export", ROOT).content
    respond(closed_proxy, "DELETE", "/api/v1/tasks/exported", ROOT)
    answer = respond(closed_proxy, "POST", "/api/v1/tasks/alice-import/import", ALICE, content=bundle)
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:forkpoint:source")
    assert respond(closed_proxy, "POST", "/api/v1/tasks/imported/import", ROOT, content=bundle).status_code == 201


@given(st.text(max_size=40))
def test_other_texts_are_no_tokens(text: str) -> None:
    access = Access(read_tokens(ROOT, None))
    assert access.grant_of(ROOT) == ALL
    if text != ROOT:
        assert access.grant_of(text.encode(errors="replace").decode()) is None


def test_token_is_required_beyond_loopback() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):  # noqa: S104
        with pytest.raises(ValueError, match="token"):
            Settings(host=host)
        assert Settings(host=host, token=SecretStr(ROOT)).host == host
    for host in ("127.0.0.1", "::1", "localhost", "127.3.2.1"):
        assert is_loopback(host)
        assert Settings(host=host).host == host


def test_grant_hides_by_pattern() -> None:
    grant = Grant(("a-*", "b"))
    assert [grant.sees(task) for task in ("a-", "a-x", "b", "bb", "A-x", "x")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
