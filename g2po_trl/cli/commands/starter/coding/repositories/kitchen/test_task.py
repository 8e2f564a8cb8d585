from task import is_done, lighter, plates, to_buy


def test_plates():
    assert plates(5) == 7


def test_is_done():
    assert is_done(9, 8)
    assert is_done(8, 8)
    assert not is_done(7, 8)


def test_to_buy():
    assert to_buy(["egg", "rice", "salt"], ["rice"]) == 2


def test_lighter():
    assert lighter(200, 50) == 50
