from task import free, income, may_enter, price


def test_price():
    assert price(4) == 11


def test_free():
    assert free(9, 4) == 5


def test_may_enter():
    assert may_enter(9, 4, False)
    assert may_enter(9, 8, False)
    assert not may_enter(9, 9, False)
    assert may_enter(4, 9, True)


def test_income():
    assert income([[2, 5], [1, 3]]) == 13
