"""A small cluster as a value: members, links, a database and one agent. It runs the rules of `proxy.cluster.protocol`.

Every event that the real cluster can meet is an action here: a message arrives (in any order, early, late or twice), a
member dies and comes back, any member takes the task over at any moment (so leases and clocks protect nothing), an
answer of the database is lost, an agent gives up and asks another member. `check` compares what the agent was
answered with what it must be answered, and the log with itself.

Records are named by the view that executed them, their parent and the call, so two executions of a call differ.
"""

from collections.abc import Hashable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.cluster.protocol import (
    NOBODY,
    Admission,
    CopyKind,
    Entered,
    IngressTask,
    Outbox,
    OwnedTask,
    Position,
    TakenCalls,
    replaceable,
)

ROLLOUT = 7
KNOWN, FRESH = "known", "fresh"
"""Two calls: the log has records of the first one to begin with, and none of the second one."""


class Own(NamedTuple):
    """A row of the log: a member owns the task."""

    member: int
    boot: int


class Made(NamedTuple):
    """A line of the log: a record."""

    parent: int
    key: str
    node: int
    view: int


Message = tuple[Any, ...]


@dataclass
class Owner:
    """What a member that owns the task, or believes so, has in memory."""

    task: OwnedTask
    outbox: Outbox[Any]
    tree: dict[tuple[int, str], Made]
    at: Position | None = None
    taken: dict[int, TakenCalls] = field(default_factory=dict)
    waiting: dict[int, tuple[int, str]] = field(default_factory=dict)
    confirmed: dict[int, int] = field(default_factory=dict)
    answers: dict[tuple[int, int, int], Message] = field(default_factory=dict)
    busy: tuple[int, int, int, str] | None = None
    leaving: bool = False
    """Whether the row on its way lets an ingress leave."""

    def copy(self) -> "Owner":
        task = copy(self.task)
        task.entered, task.unheard = dict(task.entered), set(task.unheard)
        outbox = Outbox(self.outbox.row, list(self.outbox.waiting), list(self.outbox.sent))
        taken = {ingress: deepcopy(calls) for ingress, calls in self.taken.items()}
        return Owner(
            task, outbox, dict(self.tree), self.at, taken, dict(self.waiting), dict(self.confirmed), dict(self.answers),
            self.busy, self.leaving,
        )  # fmt: skip

    def frozen(self) -> Hashable:
        taken = tuple((ingress, tuple(sorted(vars(calls).items(), key=repr))) for ingress, calls in self.taken.items())
        return (
            self.task.view, _items(self.task.entered), _items(self.tree), _items(self.waiting), _items(self.confirmed),
            _items(self.answers),
            frozenset(self.task.unheard), self.outbox.row, tuple(self.outbox.sent), self.at, repr(taken), self.busy,
            self.leaving,
        )  # fmt: skip


@dataclass
class Member:
    """One process. `positions` is on its disk; all else is lost when it dies."""

    boot: int = 1
    up: bool = True
    owner: Owner | None = None
    ingress: IngressTask = field(default_factory=IngressTask)
    calls: int = 0
    agent_call: int = 0
    """Number of the call that the agent waits for here; 0 for none."""
    reading: tuple[int, tuple[tuple[Any, ...], ...]] | None = None
    """The log as it was read for a takeover: number of the last row, and the rows."""

    def copy(self) -> "Member":
        owner = None if self.owner is None else self.owner.copy()
        ingress = IngressTask(self.ingress.view, self.ingress.positions)
        return Member(self.boot, self.up, owner, ingress, self.calls, self.agent_call, self.reading)

    def frozen(self) -> Hashable:
        owner = None if self.owner is None else self.owner.frozen()
        ingress = (self.ingress.view, _items(self.ingress.positions))
        return self.boot, self.up, owner, ingress, self.calls, self.agent_call, self.reading


@dataclass
class Agent:
    """The answers that the agent received. `again` counts the calls of the current key that it gave up."""

    node: int = 0
    asked: int = 0
    again: int = 0
    member: int | None = None


def _items(values: dict[Any, Any]) -> Hashable:
    return tuple(sorted(values.items()))


class Budget(NamedTuple):
    """How many of each event may still happen; keeps the space finite."""

    claims: int
    crashes: int
    give_ups: int = 0
    lost_acks: int = 0
    leaves: int = 0
    compactions: int = 0


class World:
    """The whole state. `actions` lists what may happen next, `apply` returns the state after one of them."""

    def __init__(self, members: int, script: tuple[str, ...], budget: Budget) -> None:
        self.script, self.budget = script, budget
        self.members = [Member() for _ in range(members)]
        self.agent = Agent()
        self.network: set[Message] = set()
        chain = tuple(Made(node, KNOWN, node + 1, 0) for node in range(len(script)))
        self.log: dict[int, tuple[Any, ...]] = {1: chain}
        self.wrong = ""
        # The first member owns the task to begin with.
        self._claim(0)

    # -- what may happen ---------------------------------------------------------------------------------------------

    def actions(self) -> Iterator[tuple[Any, ...]]:
        budget = self.budget
        for number in range(len(self.members)):
            yield from self._actions_of(number)
        agent = self.agent
        if agent.member is None and agent.asked < len(self.script):
            for number, member in enumerate(self.members):
                if member.up:
                    yield "agent asks", number
        elif agent.member is not None and budget.give_ups:
            yield ("agent gives up",)
        for message in self.network:
            yield "deliver", message
            if message[0] == "acknowledged" and message[-1] and budget.lost_acks:
                yield "lose", message

    def _actions_of(self, number: int) -> Iterator[tuple[Any, ...]]:
        member = self.members[number]
        if not member.up:
            yield "start", number
            return
        yield from self._claims_of(number)
        if self.budget.crashes:
            yield "crash", number
        for to, other in enumerate(self.members) if member.agent_call else ():
            if other.up and other.owner is not None and self._call(number, to) not in self.network:
                yield "send", number, to
        for to, other in enumerate(self.members) if self.budget.leaves else ():
            if other.up and other.owner is not None:
                yield "leave", number, to
        for ingress in sorted(member.owner.task.unheard) if member.owner is not None else ():
            if self.members[ingress].up and self._ask(number, ingress) not in self.network:
                yield "ask for", number, ingress

    def _claims_of(self, number: int) -> Iterator[tuple[Any, ...]]:
        member = self.members[number]
        if self.budget.claims and self._head() != Own(number, member.boot):
            yield "claim", number
            if self.budget.compactions and member.reading is None:
                # What a member has read may be old when its row arrives.
                yield "read", number
        if self.budget.compactions and len(self._replaceable()) > 1:
            yield ("compact",)

    def apply(self, action: tuple[Any, ...]) -> "World":
        after = copy(self)
        after.members, after.agent = [member.copy() for member in self.members], copy(self.agent)
        after.network, after.log = set(self.network), dict(self.log)
        name, *arguments = action
        getattr(after, "_" + name.replace(" ", "_"))(*arguments)
        for number, member in enumerate(after.members):
            if member.owner is not None:
                after._work(number)
        # A link ends with either of its processes, so nothing reaches a later start of a member.
        after.network = {message for message in after.network if message[0] == "append" or after._is_there(message)}
        return after

    def _is_there(self, message: Message) -> bool:
        member = self.members[message[1]]
        return member.up and member.boot == message[2]

    def frozen(self) -> Hashable:
        """Return a value that is equal for equal states."""

        agent = self.agent
        return (
            tuple(member.frozen() for member in self.members), frozenset(self.network), _items(self.log), self.budget,
            agent.node, agent.asked, agent.again, agent.member,
        )  # fmt: skip

    def check(self) -> None:
        """Assert that no answer was wrong, and that no call was recorded twice."""
        assert not self.wrong, self.wrong
        made = [(line.parent, line.key) for row in self.log.values() for line in row if isinstance(line, Made)]
        assert len(made) == len(set(made)), f"recorded twice: {made}"

    @property
    def finished(self) -> bool:
        return self.agent.asked == len(self.script)

    # -- members -----------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        member = self.members[number]
        # A member that starts looks the log up before it asks an owner anything: it has no view of its own.
        member.boot, member.up = member.boot + 1, True
        member.ingress = IngressTask(0, member.ingress.positions)

    def _crash(self, number: int) -> None:
        member = self.members[number]
        self.budget = self.budget._replace(crashes=self.budget.crashes - 1)
        member.up, member.owner, member.calls, member.reading = False, None, 0, None
        if member.agent_call:
            member.agent_call, self.agent.member = 0, None
            self.agent.again += 1

    def _claim(self, number: int) -> None:
        member = self.members[number]
        self.budget = self.budget._replace(claims=self.budget.claims - 1)
        last, rows = member.reading or self._read_log()
        member.reading = None
        if last != max(self.log):
            return
        view = last + 1
        lines = [line for row in rows for line in row if isinstance(line, Entered)]
        tree = {(made.parent, made.key): made for row in rows for made in row if isinstance(made, Made)}
        self.log[view] = (Own(number, member.boot),)
        member.owner = Owner(OwnedTask(view, lines), Outbox(view), tree)
        entered = member.owner.task.entered.get(ROLLOUT, Entered(ROLLOUT, NOBODY, Position(0, 0)))
        if entered.ingress == NOBODY:
            member.owner.at = entered.position
        # Its own positions need no message.
        self._report(number, number, view)

    def _read_log(self) -> tuple[int, tuple[tuple[Any, ...], ...]]:
        return max(self.log), tuple(row for _, row in sorted(self.log.items()))

    def _read(self, number: int) -> None:
        self.members[number].reading = self._read_log()

    def _replaceable(self) -> list[int]:
        return replaceable((number, isinstance(row[0], Own)) for number, row in sorted(self.log.items()))

    def _compact(self) -> None:
        """Let the last row that may be replaced say what all of them say."""
        self.budget = self.budget._replace(compactions=self.budget.compactions - 1)
        numbers = self._replaceable()
        lines = [line for number in numbers for line in self.log.pop(number)]
        entered = [line for line in lines if isinstance(line, Entered)][-1:]
        self.log[numbers[-1]] = (*(line for line in lines if isinstance(line, Made)), *entered)

    def _owns(self) -> Iterator[tuple[int, Own]]:
        """Yield the rows that say who owns the task, the latest one first."""
        for number, row in sorted(self.log.items(), reverse=True):
            if isinstance(row[0], Own):
                yield number, row[0]

    def _head(self) -> Own | None:
        return next((own for _, own in self._owns()), None)

    def _view(self) -> int:
        return next((number for number, _ in self._owns()), 0)

    # -- messages: what they say, after the kind, the receiver and its start ------------------------------------------

    def _to(self, kind: str, number: int, *content: Any) -> Message:
        return kind, number, self.members[number].boot, *content

    def _call(self, ingress: int, to: int) -> Message:
        member = self.members[ingress]
        view = member.ingress.view or self._view()
        key = self.script[self.agent.asked]
        return self._to("call", to, ingress, member.boot, member.agent_call, member.agent_call, view, key)

    def _ask(self, owner: int, ingress: int) -> Message:
        task = self.members[owner].owner
        assert task is not None
        return self._to("ask", ingress, owner, self.members[owner].boot, task.task.view)

    def _send(self, number: int, to: int) -> None:
        message = self._call(number, to)
        self.members[number].ingress.view = message[-2]
        self.network.add(message)

    def _ask_for(self, number: int, ingress: int) -> None:
        self.network.add(self._ask(number, ingress))

    def _deliver(self, message: Message) -> None:
        self.network.discard(message)
        kind, number, _, *content = message
        if kind == "append":
            self._written(message)
            return
        if self._is_there(message):
            getattr(self, f"_got_{kind}")(number, *content)

    def _lose(self, message: Message) -> None:
        """Lose the answer of the database: the owner does not know whether its row was written."""
        self.budget = self.budget._replace(lost_acks=self.budget.lost_acks - 1)
        self.network.discard(message)
        self._deliver((*message[:-1], False))

    def _written(self, message: Message) -> None:
        _, number, boot, row, lines = message
        # The database compares nothing but the number.
        fits = row not in self.log
        if fits:
            self.log[row] = lines
        self.network.add(("acknowledged", number, boot, row, fits))

    # -- owner -------------------------------------------------------------------------------------------------------

    def _got_call(self, number: int, ingress: int, boot: int, call: int, oldest: int, view: int, key: str) -> None:
        owner = self.members[number].owner
        if owner is None:
            return
        if view > owner.task.view:
            # A newer owner is known to the ingress.
            self.members[number].owner = None
            return
        if view < owner.task.view:
            self.network.add(("again", ingress, boot, owner.task.view))
            return
        taken = owner.taken.get(ingress)
        if taken is None or taken.boot < boot:
            taken = owner.taken[ingress] = TakenCalls(boot)
            owner.waiting.pop(ingress, None)
        if taken.boot > boot:
            return
        match taken.take(call, oldest=oldest):
            case CopyKind.NEW:
                owner.waiting[ingress] = (call, key)
                owner.confirmed.pop(ingress, None)
            case CopyKind.COPY:
                if (ingress, boot, call) in owner.answers:
                    self.network.add(owner.answers[ingress, boot, call])
            case CopyKind.LATE:
                pass

    def _work(self, number: int) -> None:
        """Answer what can be answered: a real owner tries again whenever something has changed."""
        owner = self.members[number].owner
        while (
            owner is not None
            and owner.busy is None
            and not owner.leaving
            and any(self._admit(number, owner, ingress) for ingress in sorted(owner.waiting))
        ):
            pass

    def _admit(self, number: int, owner: Owner, ingress: int) -> bool:
        """Begin to answer the call of an ingress; return whether it was answered at once."""
        if owner.busy is not None:
            return False
        (call, key), boot = owner.waiting[ingress], owner.taken[ingress].boot
        turn = -1 if owner.at is None else owner.at.turn
        admission = owner.task.admit(ROLLOUT, ingress, turn, owner.confirmed.get(ingress))
        if admission is Admission.HOLD:
            return False
        if admission is Admission.CONFIRM:
            self.network.add(("confirm", ingress, boot, number, self.members[number].boot, call, turn))
            return False
        assert owner.at is not None
        lines: list[Any] = []
        if admission is Admission.ENTER:
            owner.task.enter(Entered(ROLLOUT, ingress, owner.at))
            lines.append(Entered(ROLLOUT, ingress, owner.at))
        if (owner.at.node, key) not in owner.tree:
            view = owner.task.view
            lines.append(Made(owner.at.node, key, 1000 * view + owner.at.turn + 1, view))
        del owner.waiting[ingress]
        owner.busy = (ingress, boot, call, key)
        if not lines:
            self._answer(number)
            return True
        owner.outbox.waiting += lines
        row = owner.outbox.next_row()
        self.network.add(("append", number, self.members[number].boot, row, tuple(lines)))
        return False

    def _leave(self, ingress: int, to: int) -> None:
        self.budget = self.budget._replace(leaves=self.budget.leaves - 1)
        self.network.add(self._to("leave", to, ingress, self.members[ingress].ingress.positions.get(ROLLOUT)))

    def _got_leave(self, number: int, ingress: int, reported: Position | None) -> None:
        owner = self.members[number].owner
        if owner is None or owner.busy is not None or owner.leaving or owner.at is None:
            return
        line = owner.task.left(ROLLOUT, ingress, owner.at, reported)
        if line is not None:
            owner.leaving = True
            owner.outbox.waiting.append(line)
            row = owner.outbox.next_row()
            self.network.add(("append", number, self.members[number].boot, row, (line,)))

    def _got_acknowledged(self, number: int, row: int, fits: bool) -> None:
        owner = self.members[number].owner
        if owner is None or owner.outbox.row + 1 != row:
            return
        if not fits:
            self.members[number].owner = None
            return
        for line in owner.outbox.sent:
            if isinstance(line, Made):
                owner.tree[line.parent, line.key] = line
        owner.outbox.written()
        if owner.leaving:
            owner.leaving = False
        else:
            self._answer(number)

    def _answer(self, number: int) -> None:
        owner = self.members[number].owner
        assert owner is not None
        assert owner.busy is not None
        assert owner.at is not None
        ingress, boot, call, key = owner.busy
        made = owner.tree[owner.at.node, key]
        owner.at, owner.busy = Position(owner.at.turn + 1, made.node), None
        answer = ("answer", ingress, boot, call, owner.task.view, owner.at, made)
        owner.answers[ingress, boot, call] = answer
        self.network.add(answer)

    def _report(self, number: int, ingress: int, view: int) -> None:
        """Let an ingress adopt a view and report to the owner, without a message in between."""
        task = self.members[ingress].ingress
        if task.adopt(view):
            self._heard(number, ingress, dict(task.positions))

    def _heard(self, number: int, ingress: int, positions: dict[int, Position]) -> None:
        owner = self.members[number].owner
        assert owner is not None
        for line in owner.task.hear(ingress, positions):
            owner.at = line.position

    def _got_told(self, number: int, ingress: int, view: int, positions: tuple[tuple[int, Position], ...]) -> None:
        owner = self.members[number].owner
        if owner is not None and owner.task.view == view:
            self._heard(number, ingress, dict(positions))

    def _got_yes(self, number: int, ingress: int, boot: int, call: int, turn: int) -> None:
        owner = self.members[number].owner
        if owner is not None and owner.waiting.get(ingress, (0, ""))[0] == call and owner.taken[ingress].boot == boot:
            owner.confirmed[ingress] = turn

    # -- ingress -----------------------------------------------------------------------------------------------------

    def _got_ask(self, number: int, owner: int, boot: int, view: int) -> None:
        task = self.members[number].ingress
        if task.adopt(view):
            positions = tuple(sorted(task.positions.items()))
            self.network.add(("told", owner, boot, number, view, positions))

    def _got_again(self, number: int, view: int) -> None:
        self.members[number].ingress.adopt(view)

    def _got_confirm(self, number: int, owner: int, boot: int, call: int, turn: int) -> None:
        member = self.members[number]
        if member.agent_call == call:
            self.network.add(("yes", owner, boot, number, member.boot, call, turn))

    def _got_answer(self, number: int, call: int, view: int, position: Position, made: Made) -> None:
        member = self.members[number]
        if member.ingress.accept(view, {ROLLOUT: position}) and member.agent_call == call:
            member.agent_call, self.agent.member = 0, None
            self._told_agent(made)

    # -- agent -------------------------------------------------------------------------------------------------------

    def _agent_asks(self, number: int) -> None:
        member = self.members[number]
        member.calls += 1
        member.agent_call, self.agent.member = member.calls, number

    def _agent_gives_up(self) -> None:
        self.budget = self.budget._replace(give_ups=self.budget.give_ups - 1)
        assert self.agent.member is not None
        self.members[self.agent.member].agent_call, self.agent.member = 0, None
        self.agent.again += 1

    def _told_agent(self, made: Made) -> None:
        """Compare an answer with where the agent can be: each call that it gave up was taken, or was not."""
        key = self.script[self.agent.asked]
        rows = self.log.values()
        logged = {(line.parent, line.key): line for row in rows for line in row if isinstance(line, Made)}
        possible, node = {self.agent.node}, self.agent.node
        for _ in range(self.agent.again):
            step = logged.get((node, key))
            if step is None:
                break
            node = step.node
            possible.add(node)
        if logged.get((made.parent, made.key)) != made:
            self.wrong = f"answered and not in the log: {made}"
        elif made.key != key or made.parent not in possible:
            self.wrong = f"wrong: {made} for {key} at {possible}"
        self.agent.node, self.agent.asked, self.agent.again = made.node, self.agent.asked + 1, 0
