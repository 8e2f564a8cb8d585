from task import affordable, average, total


def test_total():
    assert total([1, 2, 4]) == 7


def test_average():
    assert average([1, 2]) == 1.5


def test_affordable():
    assert affordable(3, 5)
    assert affordable(5, 5)
    assert not affordable(6, 5)
