"""A short soak: `bench.soak` runs long ones. No answer is wrong or lost, and nothing is left, whatever fails."""

import json
import tracemalloc
from pathlib import Path

from bench.memory import PARTS
from bench.soak import KEPT, Soak, growth
from bench.traced_serve import write_parts
from proxy.tree.tree import Node, Tree
from sandboxes.spec import EnvironmentSpec
from tests.machine import data_directory, needs_root, require_sandboxes, served
from tests.test_machine_faults import small_disk


@needs_root
def test_faults_under_load_cost_no_answer() -> None:
    require_sandboxes()
    with data_directory() as folder, small_disk(folder, 1500) as disk, served(disk, **KEPT) as proxy:
        soak = Soak(proxy, None, {"local": 0}, 7, every_s=3.0, length=12, disk=disk, minutes=0.5)
        soak.run()
        assert (soak.wrong, soak.given_up) == ([], [])
        assert soak.kills.total() > 0
        assert soak.chores["import 201"] > 0
        assert soak.leftovers(60.0) == []


def test_growth_is_told_by_parts(tmp_path: Path) -> None:
    """Nodes are made between two looks. The parts and what is left over add up to the growth."""
    looks = []
    tracemalloc.start(1)
    try:
        for number in range(2):
            tree = Tree(1, Node(1), EnvironmentSpec())
            for made in range(1000 * number):
                tree.add_node(Node(made + 2))
            write_parts(tmp_path / "parts.json")
            looks.append(json.loads((tmp_path / "parts.json").read_text()))
    finally:
        tracemalloc.stop()
    *parts, whole, rest = growth(looks).values()
    assert sum(parts) + rest == whole
    assert growth(looks)[next(iter(PARTS))] > 1000 * 8, "the index of nodes in the tree"
    assert growth(looks[:1]) == growth([{}, {}]) == {}
