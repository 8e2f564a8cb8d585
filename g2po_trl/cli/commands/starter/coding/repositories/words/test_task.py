from task import count, is_short, longest


def test_longest():
    assert longest(["a", "three", "two"]) == "three"


def test_count():
    assert count("e", "three") == 2


def test_is_short():
    assert is_short("a")
    assert is_short("two")
    assert not is_short("four")
