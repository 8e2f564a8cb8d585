from task import beds, fence, is_ripe, water


def test_beds():
    assert beds(9, 2) == 4


def test_water():
    assert water([0, 2, 3]) == 2


def test_fence():
    assert fence(4, 3) == 14


def test_is_ripe():
    assert is_ripe(9, "red")
    assert is_ripe(8, "red")
    assert not is_ripe(7, "red")
    assert not is_ripe(9, "green")
