"""What people do with a cluster: show its members, drain one, and let loaded members hand tasks to others."""

import asyncio
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from proxy.cluster import messages
from proxy.cluster.balance import Move, loads_of, plan_moves
from proxy.cluster.member import Member
from proxy.cluster.postgres.database import Peer
from proxy.refusals import RefusalError

if TYPE_CHECKING:
    from proxy.execution.quotas import Quotas

PATHS = re.compile(r"/api/v1/cluster(?:/([^/]+)/drain|(/rebalance))?")
"""The cluster itself: its members, the drain of one, and the moves of tasks between them."""
MAX_MOVES = 4
"""How many tasks move at once by default. Each is read by its next owner, about 0.1 ms for each record, during which
that member answers nothing; a move may also wait `LEAVE_S` for calls that run."""
MOST_MOVES = 100
"""The largest number of tasks that may move at once."""


class Operations:
    """Answers requests about the cluster."""

    def __init__(self, member: Member, quotas: "Quotas | None" = None) -> None:
        self._member, self._quotas = member, quotas
        self._is_moving = False

    async def answer(self, method: str, path: str, query: str) -> dict[str, Any]:
        """Answer a request that `PATHS` matches, with what is sent as JSON. Raises RefusalError."""
        match = PATHS.fullmatch(path)
        node, moves = (None, None) if match is None else match.groups()
        if method != ("POST" if node or moves else "GET"):
            raise RefusalError(405, "method", "GET shows the cluster, and POST drains a member or moves tasks.")
        if moves:
            return await self._rebalance(*_options(query))
        return await (self._members() if node is None else self._drain(unquote(node)))

    async def _members(self) -> dict[str, Any]:
        own, known = self._member.database.membership, await self._member.database.members()
        return {
            "cluster": own.cluster,
            "members": [
                {"name": peer.name, "number": peer.number, "link": peer.url, "alive": peer.alive, "tasks": tasks}
                for peer, tasks in known
            ],
            "quotas": [] if self._quotas is None else await self._used(self._quotas),
        }

    async def _used(self, quotas: "Quotas") -> list[dict[str, Any]]:
        await quotas.refresh()
        return [
            {
                "tasks": pattern, "calls": quota.bound,
                "running": sum(used.running for used in (quota.usage, *quota.others)),
                "waiting": sum(used.waiting for used in (quota.usage, *quota.others)),
            }
            for pattern, quota in quotas.each.items()
        ]  # fmt: skip

    async def _drain(self, node: str) -> dict[str, Any]:
        alive = [peer for peer, _ in await self._member.database.members() if peer.alive]
        chosen = next((peer for peer in alive if peer.name == node), None)
        if chosen is None:
            raise RefusalError(404, "no-such-member", f"no member named {node!r} is running.")
        if len(alive) < 2:
            raise RefusalError(409, "last-member", f"no other member could take over the tasks of {node!r}.")
        answer = await self._member.ask(chosen.number, messages.DrainQuestion())
        if not isinstance(answer, messages.DrainAnswer):
            raise RefusalError(503, "member", f"member {node!r} does not answer. Try again.")
        return {"name": node, "handed": answer.handed, "kept": answer.kept}

    async def _rebalance(self, at_once: int, dry_run: bool) -> dict[str, Any]:
        alive = [peer for peer, _ in await self._member.database.members() if peer.alive]
        answers = dict(zip(alive, await asyncio.gather(*map(self._load_of, alive)), strict=True))
        taking = {peer.name: peer for peer, answer in answers.items() if not answer.is_leaving}
        if len(taking) < 2:
            leaving = [peer.name for peer in alive if peer.name not in taking]
            why = f" {', '.join(leaving)} hands its tasks over until its next start." if leaving else ""
            raise RefusalError(409, "last-member", f"tasks cannot move: only one member takes tasks over.{why}")
        tasks = {name: answers[peer].tasks for name, peer in taking.items()}
        planned = plan_moves(tasks)
        made = [] if dry_run else await self._move(planned, taking, at_once)
        before = loads_of(tasks)
        after = dict(before)
        for move in planned if dry_run else made:
            after[move.source] -= move.load
            after[move.target] += move.load
        return {
            "dry_run": dry_run,
            "members": [{"name": name, "before": load, "after": after[name]} for name, load in sorted(before.items())],
            "moves": [
                {"task": move.task, "from": move.source, "to": move.target, "load": move.load, "moved": move in made}
                for move in planned
            ],
        }

    async def _load_of(self, peer: Peer) -> messages.LoadAnswer:
        answer = await self._member.ask(peer.number, messages.LoadQuestion())
        if not isinstance(answer, messages.LoadAnswer):
            raise RefusalError(503, "member", f"member {peer.name!r} does not say which tasks it owns. Try again.")
        return answer

    async def _move(self, moves: list[Move], peers: dict[str, Peer], at_once: int) -> list[Move]:
        """Let the owners of tasks hand them over; return the moves that came about. Raises RefusalError."""
        if self._is_moving:
            raise RefusalError(409, "moving", "this member moves tasks already. Wait until that is done.")
        self._is_moving, room = True, asyncio.Semaphore(at_once)

        async def hand(move: Move) -> bool:
            question = messages.HandQuestion(move.task, peers[move.target].number)
            async with room:
                answer = await self._member.ask(peers[move.source].number, question)
                return isinstance(answer, messages.DrainAnswer) and bool(answer.handed)

        try:
            is_made = await asyncio.gather(*map(hand, moves))
        finally:
            self._is_moving = False
        return [move for move, made in zip(moves, is_made, strict=True) if made]


def _options(query: str) -> tuple[int, bool]:
    """Return how many tasks may move at once, and whether none does. Raises RefusalError."""
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    most, dry_run = given.get("max", str(MAX_MOVES)), given.get("dry_run", "false")
    if not (most.isdecimal() and len(most) <= 3 and 1 <= int(most) <= MOST_MOVES and dry_run in ("true", "false")):
        raise RefusalError(422, "query", f"max is a number from 1 to {MOST_MOVES}, and dry_run is true or false.")
    return int(most), dry_run == "true"
