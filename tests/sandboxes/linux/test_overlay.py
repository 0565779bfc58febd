"""How overlays are made on the kernels that take layers one by one, and on those that do not."""

import errno
import os
from pathlib import Path

import pytest

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from tests.machine import needs_root


def _layers(folder: Path) -> list[str]:
    for name in ("upper", "lower"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    return [f"{folder}/upper", f"{folder}/lower"]


@pytest.fixture
def _taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel._Layering, "together", False)


@needs_root
@pytest.mark.usefixtures("_taken")
def test_a_kernel_without_single_layers_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the options when the overlay is made, as one before Linux 6.5 does, and is not asked again."""
    asked = []

    def refuse(*_: object) -> None:
        asked.append(1)
        raise OSError(errno.EINVAL, "unrecognized mount option")

    monkeypatch.setattr(kernel, "_name_each", refuse)
    layers = _layers(tmp_path)
    for _ in range(2):
        with Opened(kernel.overlay(layers, None, None)) as overlay:
            assert sorted(os.listdir(f"/proc/self/fd/{overlay}/.")) == ["lower", "upper"]  # noqa: PTH208
    assert len(asked) == 1


@needs_root
@pytest.mark.usefixtures("_taken")
def test_one_refusal_makes_no_older_kernel(tmp_path: Path) -> None:
    """What is refused either way says nothing about the kernel, and leaves no descriptor open."""
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(OSError, match="create"):
        kernel.overlay([f"{tmp_path}"], f"{tmp_path}", f"{tmp_path}")
    assert not kernel._Layering.together
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


@needs_root
@pytest.mark.usefixtures("_taken")
def test_too_many_layers_are_refused_by_name(tmp_path: Path) -> None:
    kernel.mount_as_older_kernels()
    with pytest.raises(OSError, match=r"before 6\.5 takes no 300 layers"):
        kernel.overlay(_layers(tmp_path) * 150, None, None)
