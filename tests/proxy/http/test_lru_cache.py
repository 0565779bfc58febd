"""The mapping that forgets its oldest entries."""

from proxy.http.lru_cache import LruCache


def test_oldest_entry_is_forgotten_beyond_the_budget() -> None:
    cache: LruCache[str, int] = LruCache(2)
    for key in "abc":
        cache[key] = 1
    assert (list(cache), cache.used) == (["b", "c"], 2)


def test_written_or_moved_entry_is_the_newest() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache["a"] = cache["b"] = 1
    cache["a"] = 2
    cache["c"] = 1
    assert list(cache) == ["a", "c"]
    cache.move_to_end("a")
    cache["d"] = 1
    assert list(cache) == ["a", "d"]


def test_budget_counts_costs_and_keeps_one_entry() -> None:
    cache: LruCache[str, bytes] = LruCache(10, len)
    cache["a"], cache["b"] = b"1" * 6, b"1" * 4
    assert cache.used == 10
    cache["c"] = b"1" * 50
    assert (list(cache), cache.used) == (["c"], 50)
    del cache["c"]
    assert cache.used == 0
