from task import change, is_open, trays, unsold


def test_trays():
    assert trays(7, 3) == 3
    assert trays(6, 3) == 2


def test_unsold():
    assert unsold(["rye", "bun"], ["bun"]) == ["rye"]


def test_change():
    assert change(10, 7) == 3
    assert change(5, 7) == 0


def test_is_open():
    assert is_open(8, False)
    assert is_open(6, False)
    assert not is_open(5, False)
    assert not is_open(8, True)
