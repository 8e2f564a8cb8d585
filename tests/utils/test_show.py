"""Foreign texts in messages."""

from g2po_trl.utils.show import printable


def test_a_terminal_obeys_nothing_in_a_printable_text():
    """Titles, colours, cursors and reversed directions; tabs, lines and words of any language stay."""
    assert printable("a\x1b[2Jb\x1b]0;c\x07\x9b31m\rd\x00\u202ee") == "a�[2Jb�]0;c��31m�d��e"
    for text in ("line\n\tline", "日本 ünïcode العربية 👩‍👧"):
        assert printable(text) == text
    assert printable("one\r\ntwo") == "one\ntwo"
