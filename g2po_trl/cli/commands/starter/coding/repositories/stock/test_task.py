from task import add, enough, missing, pieces


def test_pieces():
    assert pieces(3, 4) == 12


def test_add():
    assert add({"pen": 1}, "pen") == {"pen": 2}
    assert add({}, "cup") == {"cup": 1}


def test_missing():
    assert missing(["pen"], ["pen", "cup"]) == ["cup"]


def test_enough():
    assert enough(3, 2)
    assert enough(2, 2)
    assert not enough(1, 2)
