"""`python -m tests.guest`: builds the guest, boots it, and runs the checks in it, or one command.

python -m tests.guest                    all checks
python -m tests.guest memory pids        some of them
python -m tests.guest -- uname -a        a command, as root
"""

import signal
import sys
import time

from tests.guest.checks import CHECKS
from tests.guest.image import CHECKOUT, MissingToolError, built
from tests.guest.machine import Guest, booted

CHECK_S = 420.0
"""Longest time for one check, or for a command."""


def main(arguments: list[str]) -> int:
    """Run what the arguments name. Returns 1 if a check failed, 2 if none can run, or the command's exit code."""
    if unknown := [] if arguments[:1] == ["--"] else sorted(set(arguments) - set(CHECKS)):
        print(f"There is no check {unknown[0]!r}. The checks are: {', '.join(CHECKS)}.", file=sys.stderr)
        return 2
    try:
        image = built()
    except MissingToolError as error:
        print(error, file=sys.stderr)
        return 2
    began = time.monotonic()
    with booted(image) as guest:
        print(f"Linux {guest.release} booted in {time.monotonic() - began:.0f} s.", flush=True)
        if arguments[:1] == ["--"]:
            return guest.run(" ".join(arguments[1:]), within_s=CHECK_S, echo=True).code
        passed = [passes(guest, name) for name in arguments or CHECKS]
        return int(not all(passed))


def passes(guest: Guest, name: str) -> bool:
    """Run one check in the guest, print its lines, and return whether it passed."""
    command = f"cd {CHECKOUT} && .venv/bin/python -m tests.guest.checks {name}"
    result = guest.run(command, within_s=CHECK_S, echo=True)
    if result.code == 124:
        print(f"FAILED {name}: it did not end within {CHECK_S:.0f} s.", flush=True)
    return result.code == 0


if __name__ == "__main__":
    # A time limit ends this with SIGTERM, and the machine has to end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
