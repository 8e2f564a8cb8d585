from task import is_frost, mean, warmest


def test_mean():
    assert mean([1, 2]) == 1.5


def test_warmest():
    assert warmest([4, 9, 6]) == 9


def test_is_frost():
    assert is_frost(1)
    assert is_frost(3)
    assert not is_frost(4)
