from task import doubles, is_valid, middle, wins


def test_wins():
    assert wins(5, 3)
    assert wins(4, 3)
    assert not wins(3, 3)


def test_doubles():
    assert doubles([(1, 1), (2, 3), (6, 6)]) == 2


def test_middle():
    assert middle(1, 4) == 2.5


def test_is_valid():
    assert is_valid(1)
    assert is_valid(6)
    assert not is_valid(0)
    assert not is_valid(7)
