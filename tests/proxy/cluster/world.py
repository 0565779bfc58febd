"""A small cluster as a value: members, links, a database and one agent. It runs the rules of `proxy.cluster.protocol`.

Every event that the real cluster can meet is an action here: a message arrives (early, late or never), a link breaks, a
member dies and comes back, any member takes the task over at any moment (so leases and clocks protect nothing), an
answer of the database is lost, an agent gives up and asks another member, or is told to try again. `check` compares
what the agent was answered with what it must be answered, and the log with itself.

Records are named by the view that executed them, their parent and the call, so two executions of a call differ.
"""

from collections.abc import Hashable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from proxy.cluster.protocol import Floors, Outbox, Position, StepId, Stepped, Steps, replaceable

ROLLOUT = 7
KNOWN, FRESH = "known", "fresh"
"""Two calls: the log has records of the first one to begin with, and none of the second one."""


class Own(NamedTuple):
    """A row of the log: a member owns the task."""

    member: int
    boot: int


class Made(NamedTuple):
    """A line of the log: a record. Its number is that of the node."""

    parent: int
    key: str
    node: int
    view: int


class Call(NamedTuple):
    """A call on its way, or at an owner. `link` counts the connections of its ingress to the owner that broke before.

    `oldest` is the oldest call that the ingress may make again.
    """

    ingress: int
    boot: int
    link: int
    number: int
    oldest: int
    is_again: bool
    view: int
    key: str

    @property
    def id(self) -> StepId:
        return StepId(self.ingress, self.boot, self.number, 0)


Message = tuple[Any, ...]


@dataclass
class Owner:
    """What a member that owns the task, or believes so, has in memory. The first call that waits has its turn."""

    view: int
    steps: Steps
    outbox: Outbox[Any]
    tree: dict[tuple[int, str], Made]
    at: Position
    floors: Floors = field(default_factory=Floors)
    waiting: tuple[Call, ...] = ()
    confirmed: int | None = None
    is_asking: bool = False
    is_busy: bool = False

    def copy(self) -> "Owner":
        outbox = Outbox(self.outbox.row, list(self.outbox.waiting), list(self.outbox.sent))
        floors = Floors()
        floors._of = dict(self.floors._of)
        return replace(self, steps=Steps(self.steps.lines()), outbox=outbox, tree=dict(self.tree), floors=floors)

    def frozen(self) -> Hashable:
        return (
            self.view, tuple(self.steps.lines()), self.outbox.row, tuple(self.outbox.sent), _items(self.tree), self.at,
            _items(self.floors._of), self.waiting, self.confirmed, self.is_asking, self.is_busy,
        )  # fmt: skip


@dataclass
class Member:
    """One process. All of it is lost when it dies.

    Attributes:
        agent_call: Number of the call that the agent waits for here; 0 for none.
        unanswered: Number of the call whose agent was told to try again; 0 for none.
        sent: The links on which the agent's call was sent, by owner.
        reading: The log as it was read for a takeover: number of the last row, and the rows.
    """

    boot: int = 1
    up: bool = True
    owner: Owner | None = None
    calls: int = 0
    agent_call: int = 0
    is_again: bool = False
    unanswered: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    reading: tuple[int, tuple[tuple[Any, ...], ...]] | None = None

    def copy(self) -> "Member":
        return replace(self, owner=None if self.owner is None else self.owner.copy(), sent=dict(self.sent))

    def frozen(self) -> Hashable:
        owner = None if self.owner is None else self.owner.frozen()
        call = (self.calls, self.agent_call, self.is_again, self.unanswered, _items(self.sent))
        return self.boot, self.up, owner, call, self.reading


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
    refusals: int = 0
    breaks: int = 0
    lost_acks: int = 0
    compactions: int = 0


class World:
    """The whole state. `actions` lists what may happen next, `apply` returns the state after one of them."""

    def __init__(self, members: int, script: tuple[str, ...], budget: Budget) -> None:
        self.script, self.budget = script, budget
        self.members = [Member() for _ in range(members)]
        self.agent = Agent()
        self.network: set[Message] = set()
        self.links: dict[tuple[int, int], tuple[Call, ...]] = {}
        """What is on its way from an ingress to an owner, each call on a connection of its own: in any order."""
        self.breaks: dict[tuple[int, int], int] = {}
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
        if agent.member is not None and budget.refusals:
            yield ("agent is refused",)
        yield from self._arrivals()

    def _arrivals(self) -> Iterator[tuple[Any, ...]]:
        for link, calls in self.links.items():
            for call in calls:
                yield "arrive", *link, call
            if self.budget.breaks:
                yield "break", *link
        for message in self.network:
            yield "deliver", message
            if message[0] == "acknowledged" and message[-1] and self.budget.lost_acks:
                yield "lose", message

    def _actions_of(self, number: int) -> Iterator[tuple[Any, ...]]:
        member = self.members[number]
        if not member.up:
            yield "start", number
            return
        if self.budget.claims and self._head() != Own(number, member.boot):
            yield "claim", number
            if self.budget.compactions and member.reading is None:
                # What a member has read may be old when its row arrives.
                yield "read", number
        if self.budget.compactions and len(self._replaceable()) > 1:
            yield ("compact",)
        if self.budget.crashes:
            yield "crash", number
        for to, other in enumerate(self.members) if member.agent_call else ():
            # Made again only on another link, or to another owner.
            if other.up and other.owner is not None and member.sent.get(to) != self._link(number, to):
                yield "send", number, to

    def apply(self, action: tuple[Any, ...]) -> "World":
        after = copy(self)
        after.members, after.agent = [member.copy() for member in self.members], copy(self.agent)
        after.network, after.log = set(self.network), dict(self.log)
        after.links, after.breaks = dict(self.links), dict(self.breaks)
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
            _items(self.links), _items(self.breaks), agent.node, agent.asked, agent.again, agent.member,
        )  # fmt: skip

    def check(self) -> None:
        """Assert that no answer was wrong, and that no call was recorded twice."""
        assert not self.wrong, self.wrong
        made = [(line.parent, line.key) for line in self._lines(Made)]
        assert len(made) == len(set(made)), f"recorded twice: {made}"

    @property
    def finished(self) -> bool:
        return self.agent.asked == len(self.script)

    # -- members -----------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        self.members[number] = Member(self.members[number].boot + 1)

    def _crash(self, number: int) -> None:
        self.budget = self.budget._replace(crashes=self.budget.crashes - 1)
        if self.members[number].agent_call:
            self.agent.member = None
            self.agent.again += 1
        elif self.members[number].unanswered:
            self.agent.again += 1
        self.members[number] = Member(self.members[number].boot, up=False)
        for link in tuple(self.links):
            if number in link:
                self._end(link)

    def _claim(self, number: int) -> None:
        member = self.members[number]
        self.budget = self.budget._replace(claims=self.budget.claims - 1)
        last, rows = member.reading or self._read_log()
        member.reading = None
        if last != max(self.log):
            return
        view = last + 1
        lines = [line for row in rows for line in row]
        steps = Steps(line for line in lines if isinstance(line, Stepped))
        tree = {(made.parent, made.key): made for made in lines if isinstance(made, Made)}
        self.log[view] = (Own(number, member.boot),)
        step = steps.last(ROLLOUT)
        member.owner = Owner(view, steps, Outbox(view), tree, Position(0, 0) if step is None else step.position)

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
        steps = Steps(line for line in lines if isinstance(line, Stepped))
        self.log[numbers[-1]] = (*(line for line in lines if isinstance(line, Made)), *steps.lines())

    def _lines(self, kind: type[Any]) -> list[Any]:
        return [line for _, row in sorted(self.log.items()) for line in row if isinstance(line, kind)]

    def _head(self) -> Own | None:
        owns = self._lines(Own)
        return owns[-1] if owns else None

    def _view(self) -> int:
        return max((number for number, row in self.log.items() if isinstance(row[0], Own)), default=0)

    # -- links and messages ------------------------------------------------------------------------------------------

    def _link(self, ingress: int, to: int) -> int:
        return self.breaks.get((ingress, to), 0)

    def _end(self, link: tuple[int, int]) -> None:
        """End the connections between two members: what was on them still arrives, or is lost. No answer does."""
        self.breaks[link] = self._link(*link) + 1
        self.network = {each for each in self.network if each[0] != "answer" or (each[1], each[3]) != link}

    def _break(self, ingress: int, to: int) -> None:
        self.budget = self.budget._replace(breaks=self.budget.breaks - 1)
        self._end((ingress, to))

    def _send(self, ingress: int, to: int) -> None:
        member, link = self.members[ingress], self._link(ingress, to)
        # The ingress looks the owner up; it may have been replaced since.
        owner = self.members[to].owner
        assert owner is not None
        # The agent waits for this call, and is told to try again with the one that was not answered.
        oldest = min(member.agent_call, member.unanswered or member.agent_call)
        key = self.script[self.agent.asked]
        call = Call(ingress, member.boot, link, member.agent_call, oldest, member.is_again, owner.view, key)
        member.sent[to] = link
        self.links[ingress, to] = (*self.links.get((ingress, to), ()), call)

    def _arrive(self, ingress: int, to: int, call: Call) -> None:
        self.links[ingress, to] = tuple(each for each in self.links[ingress, to] if each != call)
        owner = self.members[to].owner
        if owner is not None and call.view == owner.view:
            owner.floors.note(ingress, call.boot, call.oldest)
            owner.waiting = (*owner.waiting, call)
        elif call.link == self._link(ingress, to):
            # It asks the next owner, or this one again.
            self.members[ingress].sent.pop(to, None)

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

    def _work(self, number: int) -> None:
        """Go on with the call that has its turn: a real owner does whenever something has changed."""
        owner = self.members[number].owner
        while owner is not None and owner.waiting and not owner.is_busy and self._goes_on(number, owner):
            pass

    def _goes_on(self, number: int, owner: Owner) -> bool:
        """Begin to answer the call that has its turn; return whether it is over at once."""
        call = owner.waiting[0]
        record = owner.steps.answered(ROLLOUT, call.id, is_again=call.is_again)
        if record is not None:
            self._answer(number, owner, next(made for made in owner.tree.values() if made.node == record))
            return True
        if owner.floors.is_late(call.ingress, call.boot, call.number):
            self._end_turn(owner)
            return True
        if owner.steps.must_confirm(ROLLOUT, call.ingress, owner.at.turn, owner.confirmed):
            if not owner.is_asking:
                owner.is_asking = True
                boot = self.members[number].boot
                self.network.add(("confirm", call.ingress, call.boot, number, boot, call.number, owner.at.turn))
            return False
        made, lines = owner.tree.get((owner.at.node, call.key)), list[Any]()
        if made is None:
            made = Made(owner.at.node, call.key, 1000 * owner.view + owner.at.turn + 1, owner.view)
            lines.append(made)
        # The ingress makes no earlier call again: there is one agent.
        position = Position(owner.at.turn + 1, made.node)
        lines.append(Stepped(ROLLOUT, position, made.node, call.id, call.number))
        owner.is_busy = True
        owner.outbox.waiting += lines
        row = owner.outbox.next_row()
        self.network.add(("append", number, self.members[number].boot, row, tuple(lines)))
        return False

    def _end_turn(self, owner: Owner) -> None:
        owner.waiting, owner.confirmed, owner.is_asking, owner.is_busy = owner.waiting[1:], None, False, False

    def _got_acknowledged(self, number: int, row: int, fits: bool) -> None:
        owner = self.members[number].owner
        if owner is None or owner.outbox.row + 1 != row:
            return
        if not fits:
            # The calls that wait are made again at the next owner.
            self.members[number].owner = None
            for member in self.members:
                member.sent.pop(number, None)
            return
        *_, step = owner.outbox.sent
        for line in owner.outbox.sent:
            if isinstance(line, Made):
                owner.tree[line.parent, line.key] = line
        owner.outbox.written()
        made = owner.tree[owner.at.node, owner.waiting[0].key]
        owner.steps.take(step)
        owner.at = step.position
        self._answer(number, owner, made)

    def _answer(self, number: int, owner: Owner, made: Made) -> None:
        call = owner.waiting[0]
        self._end_turn(owner)
        if call.link == self._link(call.ingress, number):
            self.network.add(("answer", call.ingress, call.boot, number, call.number, made))

    def _got_confirmed(self, number: int, ingress: int, call: int, turn: int, waits: bool) -> None:
        owner = self.members[number].owner
        if owner is None or not owner.is_asking or owner.waiting[0][::3][:2] != (ingress, call):
            return
        owner.is_asking, owner.confirmed = False, turn
        if not waits:
            self._end_turn(owner)

    # -- ingress -----------------------------------------------------------------------------------------------------

    def _got_confirm(self, number: int, owner: int, boot: int, call: int, turn: int) -> None:
        waits = self.members[number].agent_call == call
        self.network.add(("confirmed", owner, boot, number, call, turn, waits))

    def _got_answer(self, number: int, _owner: int, call: int, made: Made) -> None:
        member = self.members[number]
        if member.agent_call == call:
            self._leave(number)
            member.unanswered = 0
            self._told_agent(made)

    def _leave(self, number: int) -> None:
        self.members[number].agent_call, self.agent.member = 0, None
        self.members[number].sent = {}

    # -- agent -------------------------------------------------------------------------------------------------------

    def _agent_asks(self, number: int) -> None:
        for other, member in enumerate(self.members):
            if other != number and member.unanswered:
                # It does not try again where it was told to.
                self.agent.again += 1
                member.unanswered = 0
        member = self.members[number]
        member.is_again, member.agent_call = bool(member.unanswered), member.unanswered
        if not member.unanswered:
            member.calls += 1
            member.agent_call = member.calls
        self.agent.member = number

    def _agent_gives_up(self) -> None:
        self.budget = self.budget._replace(give_ups=self.budget.give_ups - 1)
        assert self.agent.member is not None
        self.members[self.agent.member].unanswered = 0
        self._leave(self.agent.member)
        self.agent.again += 1

    def _agent_is_refused(self) -> None:
        self.budget = self.budget._replace(refusals=self.budget.refusals - 1)
        assert self.agent.member is not None
        member = self.members[self.agent.member]
        member.unanswered = member.agent_call
        self._leave(self.agent.member)

    def _told_agent(self, made: Made) -> None:
        """Compare an answer with where the agent can be: each call that it gave up was taken, or was not."""
        key = self.script[self.agent.asked]
        logged = {(line.parent, line.key): line for line in self._lines(Made)}
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
