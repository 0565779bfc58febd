"""Which layers of a live sandbox are its own; moves to fresh uppers are tested with whole sandboxes."""

from types import SimpleNamespace
from typing import Any, cast

from sandboxes.local.sandbox_layers import SandboxLayers


def test_layer_belongs_to_the_sandbox_until_a_state_keeps_it() -> None:
    """What a state has kept once costs a later state nothing, and closing does not delete it."""
    removed: list[object] = []
    layers = SimpleNamespace(size_bytes=len, detach=sorted)
    uppers = SimpleNamespace(take=lambda: SimpleNamespace(path="upper"))
    machine = SimpleNamespace(layers=layers, uppers=uppers, reaper=SimpleNamespace(remove=removed.extend), viewed=set())
    mine = SandboxLayers(
        cast("Any", machine), cast("Any", None), cast("Any", None), ("root",), ("new", "root"), cast("Any", None)
    )
    assert mine.above_root == ("new",)
    mine._unkept |= {"new", "merged away"}
    assert (mine.keep(), mine.keep()) == (3, 0)
    mine.remove()
    assert removed == ["upper", "merged away"]
