"""What a sandbox runs has the small CPU weight, and the sandbox cannot see it."""

import httpx
import pytest

from tests.machine import data_directory, require_sandboxes, served


def test_commands_are_behind_the_proxy() -> None:
    require_sandboxes()
    with data_directory() as folder, served(folder) as proxy:
        behind = [group for group in proxy.groups() if "/cpu" in str(group)]
        if not behind:
            pytest.skip("no version 1 hierarchy for the CPU is writable here")
        assert proxy.process is not None
        url = f"{proxy.url}/t/task/r/one/shell/exec"
        command = "grep -v ':/$' /proc/self/cgroup; cat /sys/fs/cgroup/cpu*/cpu.shares 2>&1 | grep '^[0-9]'"
        answer = httpx.post(url, json={"command": command}, timeout=60).json()
        pids = {path.parent.name: path.read_text().split() for path in behind[0].glob("*/cgroup.procs")}
        assert all(str(proxy.process.pid) not in group for group in pids.values())
        # The launcher, and each sandbox in a group of its own.
        assert pids.pop("sandboxes")
        assert any(pids.values())
        # Each of the sandbox's control groups looks like the root of its hierarchy, and its weight is no file.
        assert answer["stdout"] == ""
