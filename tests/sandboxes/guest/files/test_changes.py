"""When running processes may be changing files by themselves."""

from sandboxes.guest.files.changes import QUIET_S, Stillness


def restless_after(*steps: tuple[float, bool]) -> list[bool]:
    """Look after each pause, given in `QUIET_S`; say what was seen then, and return what is thought of it."""
    now = 100.0
    stillness, found = Stillness(lambda: now), []
    for pause, stirred in steps:
        now += pause * QUIET_S
        stillness.saw(wrote=stirred)
        found.append(stillness.restless)
    return found


def test_a_quiet_sandbox_counts_as_still() -> None:
    assert restless_after((0, False)) == [False]
    assert restless_after((0, True), (0.6, False), (0.6, False)) == [True, True, False]
    assert restless_after((0, True), (0.6, True), (0.6, False), (9, True)) == [True, True, True, True]


def test_dump_time_does_not_count_for_writers() -> None:
    """The time that a dump takes does not count for processes that write."""
    now = 100.0
    writing, starting = Stillness(lambda: now), Stillness(lambda: now)
    writing.saw(wrote=True)
    starting.saw(wrote=False, moved=True)
    now += 2 * QUIET_S
    for stillness in (writing, starting):
        stillness.stood_still(2 * QUIET_S)
    assert writing.restless
    assert not starting.restless
