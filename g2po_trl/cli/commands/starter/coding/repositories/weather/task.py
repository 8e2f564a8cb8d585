def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def warmest(values):
    best = values[0]
    for value in values:
        if value >= best:
            best = value
    return best


def is_frost(value):
    return value <= 3
