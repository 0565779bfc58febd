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
        pids = (behind[0] / "sandboxes" / "cgroup.procs").read_text().split()
        assert str(proxy.process.pid) not in pids
        # The launcher, and at least pid 1 of the rollout's sandbox.
        assert len(pids) >= 2
        # Each of the sandbox's control groups looks like the root of its hierarchy, and its weight is no file.
        assert answer["stdout"] == ""
