"""`python -m tests.guest`: builds the guest, boots it, and runs the checks in it, or one command.

    python -m tests.guest                    all checks
    python -m tests.guest memory pids        some of them
    python -m tests.guest -- uname -a        a command, as root
"""

import sys
import time

from tests.guest.image import built
from tests.guest.machine import booted

_COMMAND_S = 600.0


def main(arguments: list[str]) -> int:
    """Run what the arguments name. Returns 1 if a check failed, or the command's exit code."""
    image = built()
    began = time.monotonic()
    with booted(image) as guest:
        print(f"Linux {guest.release} booted in {time.monotonic() - began:.0f} s.", flush=True)
        return guest.run(" ".join(arguments[1:]), within_s=_COMMAND_S, echo=True).code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
