def beds(length, width):
    return length // width


def water(days):
    total = 0
    for rain in days:
        if rain <= 2:
            total += 1
    return total


def fence(length, width):
    return length * 2 + width * 2


def is_ripe(weeks, color):
    return weeks >= 8 and color == "red"
