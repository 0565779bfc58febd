"""How many spare sandboxes are kept."""

from sandboxes.host.spare_demand import LEAST, SpareDemand


def begun(*times_s: float) -> SpareDemand:
    demand = SpareDemand()
    for now_s in times_s:
        demand.note(now_s)
    return demand


def test_few_spares_without_bursts() -> None:
    """Sandboxes that begin one after another find a spare that was made in between."""
    assert begun().wanted(0.0) == LEAST
    assert begun(*range(100)).wanted(100.0) == LEAST


def test_as_many_spares_as_begin_at_once() -> None:
    assert begun(*[1000.0] * 8).wanted(1000.1) == 8


def test_a_burst_of_any_size_is_bounded() -> None:
    assert begun(*[1000.0] * 500).wanted(1000.1) == 16


def test_a_burst_is_forgotten() -> None:
    demand = begun(*[1000.0] * 16)
    kept = [demand.wanted(1000.0 + minute * 60.0) for minute in range(40)]
    assert kept == sorted(kept, reverse=True)
    assert kept[5] == 8
    assert kept[-1] == LEAST


def test_a_smaller_burst_hides_no_larger_one() -> None:
    demand = begun(*[1000.0] * 16)
    demand.note(1010.0)
    assert demand.wanted(1010.0) > 14
