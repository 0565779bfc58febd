"""Next calls: what followed similar calls is likely, within one namespace, and forgotten with its task."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.keys import CallKey
from proxy.tree.next_calls import CallKind, History, NextCalls, PastCall

NAMES = ("edit", "test", "read")


def call(name: str, *, changed: bool = True, seconds: float = 1.0) -> PastCall:
    return PastCall(CallKey(name.encode()), CallKind(name.partition(" ")[0], changed), seconds)


def taught(next_calls: NextCalls, *walk: PastCall, task: str = "task", space: str = "") -> None:
    history: History = ()
    for made in walk:
        next_calls.note(space, task, history, made)
        history = (*history[-1:], made)


def likeliest(next_calls: NextCalls, *history: PastCall, task: str = "task", space: str = "") -> str:
    likely = next_calls.likely(space, task, history, least=0.0)
    return likely[0].key.decode() if likely else ""


def test_what_followed_a_call_follows_it_again() -> None:
    next_calls = NextCalls()
    for _ in range(3):
        taught(next_calls, call("edit a"), call("test"), call("read"), call("edit b"), call("read"))
    assert likeliest(next_calls, call("edit a")) == "test"
    assert likeliest(next_calls, call("edit b")) == "read"


def test_a_call_that_was_never_made_is_like_others_of_its_kind() -> None:
    next_calls = NextCalls()
    for number in range(4):
        taught(next_calls, call(f"edit {number}"), call("test"))
    assert likeliest(next_calls, call("edit 99")) == "test"
    assert next_calls.likely("", "task", (call("edit 99"),), least=0.5)


def test_two_calls_tell_more_than_one() -> None:
    next_calls = NextCalls()
    for _ in range(3):
        taught(next_calls, call("a"), call("x"), call("b"))
        taught(next_calls, call("c"), call("x"), call("d"))
    assert likeliest(next_calls, call("a"), call("x")) == "b"
    assert likeliest(next_calls, call("c"), call("x")) == "d"


def test_other_tasks_of_the_namespace_teach_too() -> None:
    next_calls = NextCalls()
    taught(next_calls, call("edit"), call("test"), task="other", space="red")
    assert likeliest(next_calls, call("edit"), space="red") == "test"
    assert likeliest(next_calls, call("edit"), space="blue") == ""


def test_the_own_task_goes_before_others() -> None:
    next_calls = NextCalls()
    taught(next_calls, call("edit"), call("mine"))
    taught(next_calls, call("edit"), call("theirs"), task="other")
    assert likeliest(next_calls, call("edit")) == "mine"


def test_a_forgotten_task_teaches_nothing() -> None:
    next_calls = NextCalls()
    taught(next_calls, call("edit"), call("test"), task="other")
    next_calls.forget("other")
    assert likeliest(next_calls, call("edit")) == ""


def test_seconds_are_the_mean() -> None:
    next_calls = NextCalls()
    taught(next_calls, call("test", seconds=1.0), call("test", seconds=3.0))
    assert [likely.seconds for likely in next_calls.likely("", "task", (), least=0.0)] == [2.0]


@given(st.lists(st.lists(st.sampled_from(NAMES), max_size=8), max_size=8), st.lists(st.sampled_from(NAMES), max_size=2))
def test_chances_add_up_to_one_at_most(walks: list[list[str]], history: list[str]) -> None:
    next_calls = NextCalls()
    for number, walk in enumerate(walks):
        taught(next_calls, *(call(name) for name in walk), task=f"t{number % 3}")
    likely = next_calls.likely("", "t0", tuple(call(name) for name in history), least=0.0)
    assert sum(each.chance for each in likely) <= 1 + 1e-9
    assert likely == sorted(likely, key=lambda each: (-each.chance, each.key))


def test_statistics_are_bounded() -> None:
    next_calls = NextCalls()
    for number in range(10000):
        next_calls.note("", "task", (call(f"k{number}"),), call(f"c{number}"))
    (statistics,) = next_calls._tasks.values()
    assert len(statistics.following) <= 4096
    assert max(len(counts) for counts in statistics.following.values()) <= 32
    assert len(statistics.paces) <= 4096
