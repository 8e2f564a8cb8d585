from task import is_frost, mean, warm


def test_mean():
    assert mean([1, 2]) == 1.5


def test_warm():
    assert warm([4, 9, 6], 6) == [9, 6]


def test_is_frost():
    assert is_frost(0, 3)
    assert is_frost(-2, -1)
    assert not is_frost(2, 4)
