"""A short soak: `bench.soak` runs long ones. No answer is wrong or lost, and nothing is left, whatever fails."""

from bench.soak import KEPT, Soak
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
