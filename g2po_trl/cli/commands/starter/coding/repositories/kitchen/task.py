def plates(people):
    return people + people // 2


def is_done(minutes, needed):
    return minutes - needed >= 0


def to_buy(foods, pantry):
    number = 0
    for food in foods:
        if food not in pantry:
            number += 1
    return number


def lighter(grams, other):
    return grams if grams <= other else other
