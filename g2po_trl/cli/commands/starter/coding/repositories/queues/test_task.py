from task import first, is_full, join, wait


def test_join():
    assert join(["ann"], "bob") == ["ann", "bob"]
    assert join(["ann"], "ann") == ["ann"]


def test_first():
    assert first(["ann", "bob"]) == "ann"


def test_wait():
    assert wait([5, 4]) == 9


def test_is_full():
    assert is_full("abc", 2)
    assert is_full("ab", 2)
    assert not is_full("a", 2)
