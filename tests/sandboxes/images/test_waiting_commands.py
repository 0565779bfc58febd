"""Docker: main commands that only wait."""

import pytest

from sandboxes.images.waiting_commands import waits


@pytest.mark.parametrize(
    ("argv", "interactive"),
    [
        ((), False),
        (("sleep", "infinity"), False),
        (("sleep", "2h"), False),
        (("/bin/sleep", "99999"), False),
        (("tail", "-f", "/dev/null"), False),
        (("sh", "-c", "sleep infinity"), False),
        (("/bin/bash", "-c", "trap : TERM INT; sleep infinity & wait"), False),
        (("sh", "-c", "while true; do sleep 30; done"), False),
        (("bash",), True),
        (("/bin/sh",), True),
    ],
)
def test_waiting_main_command_is_recognised(argv: tuple[str, ...], *, interactive: bool) -> None:
    """A main command that only keeps its container running is not executed."""
    assert waits(argv, interactive=interactive)


@pytest.mark.parametrize(
    "argv",
    [
        ("echo", "hi"), ("sleep", "5"), ("sh", "-c", "sleep infinity; echo no"), ("bash",),
        ("sh", "-c", "make && sleep 9h"), ("tail", "-f", "/var/log/x"), ("python3", "-m", "http.server"),
    ],
)  # fmt: skip
def test_working_main_command_is_recognised(argv: tuple[str, ...]) -> None:
    """A main command that does anything else is executed."""
    assert not waits(argv, interactive=False)
