def longest(words):
    best = ""
    for word in words:
        if len(word) >= len(best):
            best = word
    return best


def count(letter, word):
    number = 0
    for one in word:
        if one == letter:
            number += 1
    return number


def is_short(word):
    return len(word) <= 3
