from task import days, is_late, longest, speed


def test_days():
    assert days(6) == 7


def test_speed():
    assert speed(9, 2) == 4.5


def test_is_late():
    assert is_late(10, 20)
    assert is_late(10, 15)
    assert not is_late(10, 14)


def test_longest():
    assert longest([3, 8, 5]) == 8
    assert longest([4]) == 4
