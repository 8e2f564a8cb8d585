def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def warm(values, limit):
    return [value for value in values if value >= limit]


def is_frost(night, day):
    return night <= 0 or day <= 0
