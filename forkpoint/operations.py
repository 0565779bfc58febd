"""What a client can ask of a proxy, of a task and of a rollout. Each operation is described once. Pure.

The docstrings speak of what a method returns; a method of an async object returns it when it is awaited.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from forkpoint.exchange import PAGE, ApiRequest, Operation, Reply, error_of, given, listed, path_of, with_json
from forkpoint.results import (
    ComparedQueries,
    Diff,
    FileResult,
    HarnessRun,
    HarnessTurn,
    Node,
    Report,
    ReportRow,
    RolloutInfo,
    ShellResult,
    SqlResult,
    Stats,
    Step,
    TaskInfo,
    ToolResponse,
    VideoResult,
    how_answered,
    made_of,
)
from forkpoint.trees import Tree

V = TypeVar("V")
Json = Mapping[str, Any]
Labels = Mapping[str, str | int | float | bool]
"""Labels of a rollout by name, such as `run`, `step`, `epoch`, `group`, `policy` and `reward`."""
ResultFormat = Literal["json", "table", "markdown", "csv", "skyrl"]
_API = ("api", "v1")


def _nothing(reply: Reply) -> None:
    del reply


def _made(kind: type[V]) -> Callable[[Reply], V]:
    return lambda reply: made_of(kind, reply.payload)


def _run_of(reply: Reply) -> HarnessRun:
    *turns, end = [json.loads(line) for line in reply.body.splitlines()]
    if "error" in end:
        raise error_of(Reply(end["error"]["status"], reply.headers, json.dumps(end["error"]).encode()))
    return HarnessRun(turns=tuple(made_of(HarnessTurn, turn) for turn in turns), exit_code=end["exit"], log=end["log"])


def _answer_as(kind: type[V]) -> Callable[[Reply], V]:
    return lambda reply: made_of(kind, reply.payload, **how_answered(reply))


class ProxyOperations:
    """Operations on a proxy."""

    @Operation
    def tasks(self) -> ApiRequest[list[TaskInfo]]:
        """List the tasks by name, with the totals of their rollouts."""
        return listed(path_of(*_API, "tasks"), lambda row: made_of(TaskInfo, row))

    @Operation
    def stats(self) -> ApiRequest[Stats]:
        """Return the totals since the proxy started, and its budgets."""
        return ApiRequest(
            "GET", path_of(*_API, "stats"), lambda reply: made_of(Stats, reply.payload, raw=reply.payload)
        )

    @Operation
    def report(
        self, by: str = "run", *, labels: Labels | None = None, task: str | None = None, price: float = 0.0
    ) -> ApiRequest[Report]:
        """Return hit rate, tool time and rewards of groups of rollouts.

        Args:
            by: `task`, `endpoint`, or the name of a label.
            labels: Only the rollouts with all of these labels; None for all.
            task: Only the rollouts of this task; None for all.
            price: Price of one hour of tool time.
        """
        path = path_of(*_API, "report") if task is None else path_of(*_API, "tasks", task, "report")
        query: dict[str, str | list[str]] = {**given(by=by, price=price), "label": label_pairs(labels or {})}
        return ApiRequest("GET", path, _report, query=query)

    @Operation
    def ready(self) -> ApiRequest[bool]:
        """Return whether the proxy can answer calls."""
        return ApiRequest("GET", "/readyz", lambda reply: reply.status == 200, accepts=frozenset({503}))


class TaskOperations:
    """Operations on a task.

    Attributes:
        name: Name of the task.
    """

    name: str

    @Operation
    def put(self, spec: Json | None = None) -> ApiRequest[TaskInfo]:
        """Set the task's environment; a new environment starts a new tree.

        Args:
            spec: The environment, as `docs/tasks.md` describes it; None for the default one.
        """
        return ApiRequest("PUT", self._path(), _made(TaskInfo), **with_json(spec or {}))

    @Operation
    def info(self) -> ApiRequest[TaskInfo]:
        """Return the task's environment and its numbers of nodes and rollouts."""
        return ApiRequest("GET", self._path(), _made(TaskInfo))

    @Operation
    def delete(self) -> ApiRequest[None]:
        """Delete the task with its trees and rollouts."""
        return ApiRequest("DELETE", self._path(), _nothing)

    @Operation
    def tree(self, node: str | None = None, *, depth: int | None = None, limit: int = 1000) -> ApiRequest[Tree]:
        """Return the task's current tree, or the subtree of a node. A notebook shows it.

        Args:
            node: Name of the subtree's top; None for the whole tree.
            depth: Number of levels below the top; None for all.
            limit: Maximum number of nodes, up to 10,000.
        """
        return ApiRequest(
            "GET", self._path("tree"), lambda reply: _tree(reply.payload),
            query=given(node=node, depth=depth, limit=limit),
        )  # fmt: skip

    @Operation
    def node(self, node: str) -> ApiRequest[Node]:
        """Return a node with the recorded answer of the call that led to it."""
        return ApiRequest("GET", self._path("nodes", node), _made(Node))

    @Operation
    def file(self, node: str, path: str) -> ApiRequest[FileResult]:
        """Return a file of a node, read from its snapshot without a sandbox; a directory is a JSON list.

        Args:
            node: Name of the node.
            path: The path from the root; empty for the root.
        """
        segments = [segment for segment in path.split("/") if segment] or [""]
        return ApiRequest("GET", self._path("nodes", node, "files", *segments), _file)

    @Operation
    def diff(self, a: str, b: str) -> ApiRequest[Diff]:
        """Return what changed from node a to node b: files, shell sessions and databases."""
        return ApiRequest(
            "GET", self._path("nodes", a, "diff", b),
            lambda reply: Diff(files=reply.payload.get("files") or [], raw=reply.payload),
        )  # fmt: skip

    @Operation
    def snapshot(self, node: str) -> ApiRequest[Node]:
        """Take a node's snapshot now, if it has none."""
        return ApiRequest("POST", self._path("nodes", node, "snapshot"), _made(Node))

    @Operation
    def pin(self, node: str, *, pinned: bool = True) -> ApiRequest[Node]:
        """Pin a node's snapshot, so that it is never evicted, or unpin it."""
        return ApiRequest("POST", self._path("nodes", node, "pin"), _made(Node), **with_json({"pinned": pinned}))

    @Operation
    def forget(self, node: str, *, end_rollouts: bool = False) -> ApiRequest[int]:
        """Forget a node and everything below it, so that its calls run again; return how many nodes were forgotten."""
        return ApiRequest(
            "DELETE", self._path("nodes", node), lambda reply: int(reply.payload["nodes"]),
            query=given(end_rollouts=end_rollouts),
        )  # fmt: skip

    @Operation
    def warm(self, count: int) -> ApiRequest[int]:
        """Prepare sandboxes at the root for the next batch of rollouts; return how many the settings allow."""
        return ApiRequest(
            "POST", self._path("warm"), lambda reply: int(reply.payload["granted"]), **with_json({"count": count})
        )

    @Operation
    def rollouts(
        self,
        *,
        labels: Labels | None = None,
        finished: bool | None = None,
        newest: bool = False,
        limit: int | None = None,
    ) -> ApiRequest[list[RolloutInfo]]:
        """List the task's rollouts, in as many requests as it takes: one for each thousand.

        Args:
            labels: Only the rollouts with all of these labels; None for all.
            finished: Only the rollouts that have ended, or that have not; None for both.
            newest: Whether the newest come first, instead of the oldest.
            limit: Maximum number of rollouts; None for all.
        """
        sort = "-created_at" if newest else "created_at"
        query: dict[str, str | list[str]] = {**given(sort=sort, finished=finished), "label": label_pairs(labels or {})}
        return listed(self._path("rollouts"), _rollout, most=limit, query=query)

    @Operation
    def compare(self, *, labels: Labels | None = None, above: float | None = None) -> ApiRequest[Json]:
        """Return where rollouts part and end alike, and what only those with a high reward did, as a JSON object.

        Args:
            labels: Only the rollouts with all of these labels; None for all.
            above: Rewards above this are high; None for the middle of all rewards.
        """
        query: dict[str, str | list[str]] = {**given(above=above), "label": label_pairs(labels or {})}
        return ApiRequest("GET", self._path("compare"), lambda reply: reply.payload, query=query)

    def _path(self, *segments: str) -> str:
        return path_of(*_API, "tasks", self.name, *segments)


class RolloutOperations:
    """Operations on a rollout.

    Attributes:
        task_name: Name of its task.
        name: Name of the rollout.
        labels: The labels that it begins with.
    """

    task_name: str
    name: str
    labels: Labels

    @Operation
    def begin(self) -> ApiRequest[RolloutInfo]:
        """Begin the rollout at the root of its task's tree, and return it with its token.

        The first call of a rollout that was not begun does the same; a `with` block begins its rollout.
        """
        return ApiRequest(
            "POST", path_of(*_API, "tasks", self.task_name, "rollouts"), _rollout_view,
            **with_json({"rollout": self.name, "labels": dict(self.labels)}),
        )  # fmt: skip

    @Operation
    def info(self, *, cursor: str | None = None, limit: int = PAGE) -> ApiRequest[RolloutInfo]:
        """Return the rollout with a page of its steps.

        Args:
            cursor: `next_steps` of the page before; None for the first page.
            limit: Maximum number of steps, up to 1,000.
        """
        return ApiRequest("GET", self._control_path(), _rollout_view, query=given(cursor=cursor, limit=limit))

    @Operation
    def label(self, /, **labels: str | float | bool | None) -> ApiRequest[RolloutInfo]:
        """Change the rollout's labels, also after its end, for example `reward=1.0`; None removes a label."""
        return ApiRequest("PATCH", self._control_path("labels"), _rollout_view, **with_json(labels))

    @Operation
    def finish(self) -> ApiRequest[None]:
        """Finish the rollout, so that its sandbox and its name are free. A rollout that has ended stays so."""
        return ApiRequest("DELETE", self._control_path(), _nothing, accepts=frozenset({404}))

    @Operation
    def exec(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        session: str | None = None,
        service: str | None = None,
        user: str | None = None,
    ) -> ApiRequest[ShellResult]:
        """Run a command in the rollout's shell.

        Args:
            command: The command for bash.
            timeout_s: Seconds after which the command is ended; None for the task's limit.
            session: One of several shells over the same files; None for `main`.
            service: A side service of the task that runs the command, in a new `/bin/sh`; None for the main container.
            user: User of the service, or `user:group`; None for the service's own.
        """
        body = {"command": command, "timeout_s": timeout_s, "session": session, "service": service, "user": user}
        return self._call("POST", ("shell", "exec"), _answer_as(ShellResult), body=body, timeout_s=timeout_s)

    @Operation
    def harness(
        self,
        upstream: str,
        *,
        headers: Mapping[str, str] | None = None,
        command: str | None = None,
        env: Mapping[str, str] | None = None,
        parent: str | None = None,
        turn: int | None = None,
        timeout_s: float = 86_400.0,
    ) -> ApiRequest[HarnessRun]:
        """Run the agent inside the task's sandbox, or go on with it where it stands, to its end.

        Args:
            upstream: The URL of this rollout's model, which precedes the paths of the agent's requests.
            headers: Headers of these requests in place of the agent's, such as the key.
            command: The agent's command; None for the task's. A rollout with a parent has its parent's, and its `env`.
            env: Variables beyond the task's. `{model}` stands for the URL at which the agent finds its model.
            parent: A rollout of the same task that this one begins as; None for the agent's start.
            turn: With a parent, how many responses of its model this rollout shares with it; None for all.
            timeout_s: Seconds after which the client gives up. The agent's turn goes on, and the run can too.
        """
        body = {
            "upstream": upstream, "headers": headers, "command": command, "env": env, "parent": parent, "turn": turn,
        }  # fmt: skip
        return self._call("POST", ("harness",), _run_of, body=body, timeout_s=timeout_s)

    @Operation
    def write(self, path: str, content: bytes | str, *, mode: str | None = None) -> ApiRequest[FileResult]:
        """Write a file; missing directories are created.

        Args:
            path: Its absolute path in the sandbox.
            content: Its content; a string is written as UTF-8.
            mode: Its permission bits in octal, such as `755`; None for the default.
        """
        data = content.encode() if isinstance(content, str) else content
        return ApiRequest(
            "PUT", self._file(path), _file, query=given(mode=mode), body=data, headers=labels_header(self.labels)
        )

    @Operation
    def read(self, path: str) -> ApiRequest[FileResult]:
        """Read a file, or list a directory as JSON. A missing file is a `ForkpointError` of status 404."""
        return ApiRequest("GET", self._file(path), _file, headers=labels_header(self.labels))

    @Operation
    def remove(self, path: str) -> ApiRequest[FileResult]:
        """Delete a file."""
        return ApiRequest("DELETE", self._file(path), _file, headers=labels_header(self.labels))

    @Operation
    def sql(
        self,
        statement: str,
        *,
        params: Sequence[Any] | Json | None = None,
        database: str | None = None,
        max_rows: int | None = None,
        timeout_s: float | None = None,
        format: ResultFormat | None = None,  # noqa: A002 - the name of the argument in the API
    ) -> ApiRequest[SqlResult]:
        """Run one statement on the rollout's database.

        Args:
            statement: The statement.
            params: Values of its parameters.
            database: Name of the database; None for the task's first.
            max_rows: Maximum number of rows; None for 100.
            timeout_s: Seconds after which it is stopped; None for 5.
            format: Form of the rows; None for JSON.
        """
        return self._sql(
            "query", sql=statement, params=params, database=database, max_rows=max_rows, timeout_s=timeout_s,
            format=format,
        )  # fmt: skip

    @Operation
    def sql_script(
        self, script: str, *, database: str | None = None, timeout_s: float | None = None
    ) -> ApiRequest[SqlResult]:
        """Run several statements, all or none; the rows are those of the last one that has rows."""
        return self._sql("script", sql=script, database=database, timeout_s=timeout_s)

    @Operation
    def sql_explain(
        self, statement: str, *, params: Sequence[Any] | Json | None = None, database: str | None = None
    ) -> ApiRequest[SqlResult]:
        """Return the plan of a statement, which does not run."""
        return self._sql("explain", sql=statement, params=params, database=database)

    @Operation
    def sql_tables(self, *, database: str | None = None) -> ApiRequest[SqlResult]:
        """List the tables and views of a database."""
        return self._sql("tables", database=database)

    @Operation
    def sql_schema(self, table: str | None = None, *, database: str | None = None) -> ApiRequest[SqlResult]:
        """Return the schema of a table with its indexes and triggers; None for everything."""
        return self._sql("schema", table=table, database=database)

    @Operation
    def sql_compare(
        self, statement: str, gold: str, *, ordered: bool = False, database: str | None = None
    ) -> ApiRequest[ComparedQueries]:
        """Return whether two queries have the same rows at the rollout's state, which stays as it is."""
        body = {"sql": statement, "gold": gold, "ordered": ordered, "database": database}
        return self._call("POST", ("sql", "compare"), _answer_as(ComparedQueries), body=body)

    @Operation
    def video(self, tool: str, /, **arguments: Any) -> ApiRequest[VideoResult]:
        """Call a video tool with its arguments, as `docs/video.md` lists them."""
        return self._call("POST", ("video", tool), _video, body=arguments, accepts=frozenset({422}))

    @Operation
    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ApiRequest[ToolResponse]:
        """Send any request to one of the task's tool servers, and return its response whatever its status.

        Args:
            method: The HTTP method.
            path: The path below the rollout's base URL: the server's name, and what follows.
            query: Query parameters.
            json: The body as JSON; None for `content`.
            content: The body as bytes; None for none.
            headers: More headers.
        """
        sent = with_json(json) if json is not None else {"body": content, "headers": {}}
        sent["headers"] |= {**labels_header(self.labels), **(headers or {})}
        target = f"{self._tools_path()}/{path.lstrip('/')}"
        return ApiRequest(method, target, _response, query=query or {}, accepts=frozenset(range(100, 600)), **sent)

    def _tools_path(self) -> str:
        return path_of("t", self.task_name, "r", self.name)

    def _control_path(self, *segments: str) -> str:
        return path_of(*_API, "tasks", self.task_name, "rollouts", self.name, *segments)

    def _fork(self, name: str, node: str | None, labels: Labels | None) -> ApiRequest[RolloutInfo]:
        body: dict[str, Any] = {"name": name, "labels": dict(labels or {})}
        if node is not None:
            body["node"] = node
        return ApiRequest("POST", self._control_path("fork"), _rollout_view, **with_json(body))

    def _file(self, path: str) -> str:
        return f"{self._tools_path()}/shell/files{path_of(*path.strip('/').split('/'))}"

    def _sql(self, tool: str, **body: object) -> ApiRequest[SqlResult]:
        timeout_s = body.get("timeout_s")
        return self._call(
            "POST", ("sql", tool), _answer_as(SqlResult), body=body,
            timeout_s=timeout_s if isinstance(timeout_s, int | float) else None,
        )  # fmt: skip

    def _call(self, method: str, segments: tuple[str, ...], read: Any, *, body: Json, **more: Any) -> ApiRequest[Any]:
        # A default that is left out is decided by the proxy, and is the same call as one that is sent.
        sent = with_json({name: value for name, value in body.items() if value is not None})
        sent["headers"] |= labels_header(self.labels)
        return ApiRequest(method, self._tools_path() + path_of(*segments), read, **sent, **more)


def labels_header(labels: Labels) -> dict[str, str]:
    """Return the header with the labels of a rollout that a call may begin; empty without labels."""
    pairs = (pair.partition("=") for pair in label_pairs(labels))
    text = ",".join(f"{name}={quote(value, safe='')}" for name, _, value in pairs)
    return {"x-forkpoint-labels": text} if text else {}


def label_pairs(labels: Labels) -> list[str]:
    """Return labels as the query of a list has them."""
    texts = {True: "true", False: "false"}
    return [f"{name}={texts[v] if isinstance(v, bool) else v}" for name, v in labels.items()]


def _tree(payload: Json) -> Tree:
    nodes = [made_of(Node, node) for node in payload["nodes"]]
    return Tree(task=payload["task"], root=payload["root"], nodes=nodes, truncated=payload["truncated"])


def _report(reply: Reply) -> Report:
    view = reply.payload
    rows = [made_of(ReportRow, row) for row in view["rows"]]
    total, calls = made_of(ReportRow, view["total"]), view.get("calls", [])
    return Report(total=total, rows=rows, arms=view["arms"], truncated=view["truncated"], calls=calls)


def _rollout(payload: Json) -> RolloutInfo:
    page = payload.get("steps") or {"items": (), "next": None}
    steps = [made_of(Step, step, title=(step["call"] or {}).get("title", "")) for step in page["items"]]
    members = {name: value for name, value in payload.items() if name != "steps"}
    return made_of(RolloutInfo, members, steps=steps, next_steps=page["next"])


def _rollout_view(reply: Reply) -> RolloutInfo:
    return _rollout(reply.payload)


def _file(reply: Reply) -> FileResult:
    return FileResult(content=reply.body, media_type=reply.headers.get("content-type", ""), **how_answered(reply))


def _video(reply: Reply) -> VideoResult:
    media_type = reply.headers.get("content-type", "")
    payload = reply.payload if media_type.partition(";")[0] == "application/json" else {}
    error = payload.get("error") if reply.status == 422 else None
    return VideoResult(
        payload={} if error else payload, content=reply.body, media_type=media_type, error=error, **how_answered(reply)
    )


def _response(reply: Reply) -> ToolResponse:
    return ToolResponse(status=reply.status, headers=reply.headers, content=reply.body, **how_answered(reply))
