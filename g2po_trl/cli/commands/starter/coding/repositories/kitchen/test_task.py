from task import is_done, share, shopping, weight


def test_share():
    assert share(3, 2) == 1.5


def test_is_done():
    assert is_done(9, 8)
    assert is_done(8, 8)
    assert not is_done(7, 8)


def test_shopping():
    assert shopping(["egg", "rice"], ["rice"]) == ["egg"]


def test_weight():
    assert weight([200, 50]) == 250
