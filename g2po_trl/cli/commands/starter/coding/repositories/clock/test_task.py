from task import half, is_noon, is_open, minutes


def test_minutes():
    assert minutes(2, 5) == 125


def test_is_open():
    assert is_open(10)
    assert is_open(9)
    assert not is_open(8)
    assert not is_open(18)


def test_half():
    assert half(3) == 1.5


def test_is_noon():
    assert is_noon(12, 0)
    assert not is_noon(12, 5)
    assert not is_noon(3, 0)
