def days(nights):
    return nights + 1


def speed(miles, hours):
    return miles / hours


def is_late(planned, real):
    return real >= planned + 5


def longest(trips):
    best = trips[0]
    for trip in trips:
        if trip >= best:
            best = trip
    return best
