"""Words as split by Lucene's StandardTokenizer (version 8, which the official shop's search uses).

It follows Unicode's annex 29, with some deviations. A word consists of letters, numbers and characters that join them;
"letter" and "number" are the annex's classes, so ⅷ and Ⓐ are letters, while ½, ² and ① are neither and are dropped,
even inside a word. A run of a script that is written without spaces (Thai, Lao, Khmer, Burmese) is one word, and so
are an emoji with all that modifies it, a flag, a Chinese character, and a hiragana.
"""

from __future__ import annotations

from collections.abc import Iterator

import regex

_LONGEST = 255  # characters the tokenizer sees at a time: a longer word is cut, and its rest read anew

# What follows a character and belongs to it. Skin tones do not: they are emoji, in the version of Unicode it was made
# for.
_MARK = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}--\p{Emoji_Modifier}]"
_MARKS = rf"{_MARK}*+"
_LETTER, _HEBREW, _KATAKANA = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]", r"\p{WB=Hebrew_Letter}", r"\p{WB=Katakana}"
_NUMBER = r"[\p{WB=Numeric}[\p{Block=Halfwidth_And_Fullwidth_Forms}&&\p{Nd}]]"
_IN_WORD = r"[\p{WB=MidLetter}\p{WB=MidNumLet}\p{WB=Single_Quote}]"
_IN_NUMBER = r"[\p{WB=MidNum}\p{WB=MidNumLet}\p{WB=Single_Quote}]"
_JOINERS = rf"(?:\p{{WB=ExtendNumLet}}{_MARKS})"

_PART = (
    rf"(?:{_HEBREW}{_MARKS}(?:'{_MARKS}|\"{_MARKS}{_HEBREW}{_MARKS})"
    rf"|{_LETTER}{_MARKS}(?:{_IN_WORD}{_MARKS}(?={_LETTER}))?+"
    rf"|{_NUMBER}{_MARKS}(?:{_IN_NUMBER}{_MARKS}(?={_NUMBER}))?+)"
)
_PARTS = rf"(?:{_PART}++|(?:{_KATAKANA}{_MARKS})++)"
_WORD = rf"{_JOINERS}*+{_PARTS}(?:{_JOINERS}++{_PARTS})*+{_JOINERS}*+"

# Extended_Pictographic of Unicode 11. Version 17 keeps less of it: ★, which is in many a title, is no longer in it.
_PICTOGRAPHS = (
    "A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 2388 23CF 23E9-23F3 23F8-23FA 24C2 25AA-25AB "
    "25B6 25C0 25FB-25FE 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 2716 271D 2721 2728 2733-2734 "
    "2744 2747 274C 274E 2753-2755 2757 2763-2767 2795-2797 27A1 27B0 27BF 2934-2935 2B05-2B07 2B1B-2B1C 2B50 "
    "2B55 3030 303D 3297 3299 1F000-1F0FF 1F10D-1F10F 1F12F 1F16C-1F171 1F17E-1F17F 1F18E 1F191-1F19A "
    "1F1AD-1F1E5 1F201-1F20F 1F21A 1F22F 1F232-1F23A 1F23C-1F23F 1F249-1F3FA 1F400-1F53D 1F546-1F64F "
    "1F680-1F6FF 1F774-1F77F 1F7D5-1F7FF 1F80C-1F80F 1F848-1F84F 1F85A-1F85F 1F888-1F88F 1F8AE-1F8FF "
    "1F90C-1F93A 1F93C-1F945 1F947-1FFFD"
)
_PICTURE = "[" + regex.sub(r"\w+", lambda code: rf"\U{code[0]:0>8}", _PICTOGRAPHS).replace(" ", "") + "]"
# Emoji: marks but the selectors of their look, which end one.
_EMOJI_MARKS = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}--\p{Emoji_Modifier}--[\uFE0E\uFE0F]]*+"
_ONE_EMOJI = (
    rf"(?:\u200D*+(?:\p{{Emoji_Modifier_Base}}{_EMOJI_MARKS}\p{{Emoji_Modifier}}{_EMOJI_MARKS}"
    rf"|{_PICTURE}{_EMOJI_MARKS}\uFE0F?+)|\p{{Emoji_Modifier}}{_EMOJI_MARKS})"
)
_EMOJI = (
    rf"{_ONE_EMOJI}(?:(?:(?<=\u200D)|\u200D){_ONE_EMOJI})*+"
    rf"|[#*][\p{{WB=Format}}\p{{WB=Extend}}\p{{WB=ZWJ}}]*?\u20E3{_EMOJI_MARKS}"
    rf"|(?:\p{{Regional_Indicator}}{_MARKS}){{2}}"
)
_ALONE = rf"(?:\p{{Line_Break=Complex_Context}}{_MARKS})++|[\p{{Script=Han}}\p{{Script=Hiragana}}]{_MARKS}"
_TOKEN = regex.compile(rf"{_WORD}|{_EMOJI}|{_ALONE}", regex.V1)


def split_words(text: str) -> Iterator[str]:
    """Return a text's words, in order."""
    place = 0
    while place < len(text):
        found = _TOKEN.search(text, place, place + 2 * _LONGEST)
        if found is None or found.start() >= place + _LONGEST:  # all that would begin before has been seen whole
            place += _LONGEST
            continue
        if found.end() - found.start() > _LONGEST:
            found = _TOKEN.match(text, found.start(), found.start() + _LONGEST)
        yield found.group()
        place = found.end()
