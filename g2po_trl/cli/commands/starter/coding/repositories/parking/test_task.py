from task import free, income, may_enter, price


def test_price():
    assert price(4) == 11


def test_free():
    assert free(9, 4) == 5


def test_may_enter():
    assert may_enter(9, 4)
    assert may_enter(9, 9)
    assert not may_enter(4, 9)


def test_income():
    assert income([3, 5]) == 8
