from task import initials, is_question, is_same, shorten


def test_shorten():
    assert shorten("abcd", 3) == "abc"
    assert shorten("ab", 3) == "ab"


def test_initials():
    assert initials("Ada", "Byron") == "AB"


def test_is_same():
    assert is_same("Ab", "aB")
    assert not is_same("a", "b")


def test_is_question():
    assert is_question("a?")
    assert not is_question("?")
    assert not is_question("ab")
