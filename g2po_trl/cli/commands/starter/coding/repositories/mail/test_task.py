from task import address, is_mail, senders, unread


def test_address():
    assert address("ann", "home") == "ann@home"


def test_is_mail():
    assert is_mail("a@b.c")
    assert not is_mail("a@b")
    assert not is_mail("abcdef")


def test_unread():
    assert unread(["a", "b", "c"], ["a"]) == 2


def test_senders():
    assert senders([("ann", 1), ("bob", 2), ("ann", 3)]) == ["ann", "bob"]
