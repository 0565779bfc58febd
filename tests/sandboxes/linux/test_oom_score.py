"""OOM scores, on a model of the kernel's rule: this machine may lack the right that the rule is about."""

from collections.abc import Callable

import pytest

from sandboxes.linux import oom_score
from sandboxes.linux import syscalls as kernel

ALL = (1 << 41) - 1


class Kernel:
    """Scores and lowest scores of processes, as `__set_oom_adj` of the kernel (fs/proc/base.c) changes them."""

    def __init__(self, score: int, capabilities: int) -> None:
        """All processes have this score and lowest score, as after a restore by CRIU."""
        self.permitted = self.effective = capabilities
        self.processes: dict[int | str, tuple[int, int]] = dict.fromkeys((2, 3, "self"), (score, score))

    def write(self, score: int, process: int | str = "self") -> None:
        may = bool(self.effective >> kernel.CAP_SYS_RESOURCE & 1)
        _, lowest = self.processes[process]
        if score < lowest and not may:
            return
        self.processes[process] = (score, score if may else lowest)

    def read(self, process: int | str = "self") -> int:
        return self.processes[process][0]

    def capset(self, effective: int, permitted: int | None = None) -> None:
        permitted = effective if permitted is None else permitted
        assert not permitted & ~self.permitted
        self.effective, self.permitted = effective, permitted


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Kernel]:
    def make(score: int, capabilities: int) -> Kernel:
        model = Kernel(score, capabilities)
        monkeypatch.setattr(oom_score, "write", model.write)
        monkeypatch.setattr(oom_score, "read", model.read)
        monkeypatch.setattr(kernel, "permitted", lambda: model.permitted)
        monkeypatch.setattr(kernel, "capset", model.capset)
        return model

    return make


@pytest.mark.parametrize(("restored", "expected"), [(500, 500), (700, 700), (0, 0), (-900, 0)])
def test_a_restored_process_can_lower_itself_to_zero(
    on: Callable[[int, int], Kernel], restored: int, expected: int
) -> None:
    """CRIU's write has made the restored score the lowest one. A score of an older version gives no shelter."""
    model = on(restored, ALL)
    oom_score.let_lower([2, 3])
    assert (model.processes[2], model.processes[3]) == ((expected, 0), (expected, 0))
    assert model.effective == model.permitted == ALL


def test_without_the_right_scores_stay(on: Callable[[int, int], Kernel]) -> None:
    """CRIU had no right either, so the lowest score is what it was."""
    model = on(500, ALL & ~(1 << kernel.CAP_SYS_RESOURCE))
    oom_score.let_lower([2])
    assert model.processes[2] == (500, 500)


@pytest.mark.parametrize(("own", "expected"), [(0, oom_score.PROXY), (300, oom_score.PROXY), (-997, -997)])
def test_the_proxy_is_sheltered(on: Callable[[int, int], Kernel], own: int, expected: int) -> None:
    """A proxy that was given a lower score keeps it."""
    model = on(own, ALL)
    oom_score.shelter()
    assert model.read() == expected
