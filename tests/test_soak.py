"""A short soak: `bench.soak` runs long ones. No answer is wrong or lost, and nothing is left, whatever fails."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from bench.measured_serve import write_parts
from bench.memory import PARTS, ROOT, private_bytes
from bench.resident import LIBC_FREE, Mapping, by_kind, mappings
from bench.soak import KEPT, Soak, growth
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
        assert proxy.process is not None
        whole = by_kind(list(mappings(Path(f"/proc/{proxy.process.pid}/smaps").read_text())))[1]
        assert whole["thread heap"] == 0, "the proxy's threads have one heap"
        assert soak.leftovers(60.0) == []


def test_growth_is_divided_into_parts(tmp_path: Path) -> None:
    """Nodes are made between two looks, and half of some large blocks are freed. The parts are the private memory."""
    looks, sizes = [], []
    tracemalloc.start(1)
    try:
        blocks = [bytes(5000) for _ in range(2000)]
        for number in range(2):
            tree = Tree(1, Node(1), EnvironmentSpec())
            for made in range(1000 * number):
                tree.add_node(Node(made + 2))
            write_parts(tmp_path / "parts.json")
            sizes.append(private_bytes())
            looks.append(json.loads((tmp_path / "parts.json").read_text()))
            del blocks[::2]
    finally:
        tracemalloc.stop()
    # The kernel counts pages for each core, and adds them up later.
    assert [sum(look.values()) for look in looks] == pytest.approx(sizes, abs=2 << 20)
    grown = growth(looks)
    assert grown[next(iter(PARTS))] > 1000 * 8, "the index of nodes in the tree"
    assert grown[LIBC_FREE] > 4_000_000, "freed blocks between others"
    assert growth(looks[:1]) == growth([{}, {}]) == {}


def test_mappings_have_kinds() -> None:
    """Stacks and heaps of threads lie beside memory without rights."""
    heap, stack, page = 64 << 20, 200 << 20, 4096
    mapped = [
        Mapping(page, 2 * page, "rw-p", "/lib/some.so", 1),
        Mapping(10 * page, 20 * page, "rw-p", "[heap]", 2),
        Mapping(heap, heap + page, "rw-p", "", 3),
        Mapping(heap + page, 2 * heap, "---p", ""),
        Mapping(2 * heap, 2 * heap + page, "rw-p", "", 4),
        Mapping(stack, stack + page, "---p", ""),
        Mapping(stack + page, stack + 9 * page, "rw-p", "", 5),
    ]
    private, whole = by_kind(mapped)
    assert private == {"data": 1, "heap": 2, "thread heap": 3, "other": 4, "stack": 5}
    assert (whole["heap"], whole["thread heap"], whole["other"]) == (10 * page, page, page)


@pytest.mark.parametrize(("before", "heaps"), [("pass", 3), ("share_heap()", 0)])
def test_threads_share_a_heap_if_set(before: str, heaps: int) -> None:
    """Each of three threads takes blocks that are too large for Python's own allocator."""
    program = f"""
from pathlib import Path
from threading import Barrier, Thread
from bench.resident import by_kind, mappings
from sandboxes.linux.syscalls import share_heap
{before}
barrier = Barrier(4)
def take():
    blocks = [bytes(1000) for _ in range(100)]
    barrier.wait(30), barrier.wait(30)
threads = [Thread(target=take) for _ in range(3)]
[thread.start() for thread in threads]
barrier.wait(30)
whole = by_kind(list(mappings(Path("/proc/self/smaps").read_text())))[1]["thread heap"]
barrier.wait(30)
print(whole // (100 * 1000))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert min(3, int(done.stdout)) == heaps
