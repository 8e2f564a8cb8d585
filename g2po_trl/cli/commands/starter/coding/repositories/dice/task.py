def wins(mine, other):
    return mine >= other + 1


def doubles(throws):
    number = 0
    for one, two in throws:
        if one == two:
            number += 1
    return number


def middle(low, high):
    return (low + high) / 2


def is_valid(throw):
    return throw >= 1 and throw <= 6
