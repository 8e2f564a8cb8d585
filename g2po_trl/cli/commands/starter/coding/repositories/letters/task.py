def shorten(text, size):
    return text if len(text) <= size else text[:size]


def initials(one, two):
    return one[0] + two[0]


def is_same(one, two):
    return one.lower() == two.lower()


def is_question(text):
    return len(text) >= 2 and text[-1] == "?"
