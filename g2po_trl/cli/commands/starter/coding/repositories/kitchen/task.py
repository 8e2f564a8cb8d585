def share(cups, people):
    return cups / people


def is_done(minutes, needed):
    return minutes >= needed


def shopping(foods, pantry):
    result = []
    for food in foods:
        if food not in pantry:
            result.append(food)
    return result


def weight(grams):
    total = 0
    for one in grams:
        total += one
    return total
