"""Open sandboxes keep their parts, and leave once they are closed."""

import asyncio
from dataclasses import dataclass

from sandboxes.open_sandboxes import OpenSandboxes


@dataclass(eq=False)
class FakeSandbox:
    parts: tuple[str, ...]
    closed: bool = False

    async def close(self) -> None:
        self.closed = True


def test_open_sandbox_keeps_its_parts() -> None:
    """The parts are read each time, because a sandbox changes them while it works."""
    sandboxes = OpenSandboxes[FakeSandbox]()
    first, second = FakeSandbox(("a", "b")), FakeSandbox(("b", "c"))
    sandboxes.add(first)
    sandboxes.add(second)
    assert sandboxes.parts_in_use() == {"a", "b", "c"}
    first.parts = ("d",)
    assert sandboxes.parts_in_use() == {"b", "c", "d"}
    second.closed = True
    assert sandboxes.parts_in_use() == {"d"}
    assert list(sandboxes) == [first]


def test_held_parts_are_in_use() -> None:
    """Two restores of one state hold it independently of each other, and a part may be added while it is held."""
    sandboxes = OpenSandboxes[FakeSandbox]()
    parts = {"x": "a"}
    with sandboxes.holding(("a",)), sandboxes.holding(parts.values()):
        parts["y"] = "b"
        with sandboxes.holding(("a",)):
            pass
        assert sandboxes.parts_in_use() == {"a", "b"}
    assert sandboxes.parts_in_use() == set()


def test_close_ends_every_sandbox() -> None:
    sandboxes = OpenSandboxes[FakeSandbox]()
    both = [FakeSandbox(()), FakeSandbox(())]
    for sandbox in both:
        sandboxes.add(sandbox)
    asyncio.run(sandboxes.close())
    assert all(sandbox.closed for sandbox in both)
    assert list(sandboxes) == []
