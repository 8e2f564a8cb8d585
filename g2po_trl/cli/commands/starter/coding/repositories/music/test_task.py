from task import can_play, is_duo, last, length


def test_length():
    assert length([(1, 10), (2, 5)]) == 195


def test_is_duo():
    assert is_duo(["ann", "bob"])
    assert not is_duo(["ann"])


def test_last():
    assert last(["a", "b", "c"]) == "c"


def test_can_play():
    assert can_play("waltz", ["waltz"], 1)
    assert can_play("waltz", [], 10)
    assert not can_play("waltz", [], 9)
