from task import fine, is_new, lend, title


def test_lend():
    assert lend(["a", "b"], "a") == ["b"]
    assert lend(["b"], "a") == ["b"]


def test_fine():
    assert fine(5) == 10
    assert fine(3) == 6
    assert fine(2) == 0


def test_title():
    assert title("dune") == "Dune"


def test_is_new():
    assert is_new(2020, 2020)
    assert is_new(2019, 2020)
    assert not is_new(2018, 2020)
