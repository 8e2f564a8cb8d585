def price(hours):
    return hours * 2 + 3


def free(places, cars):
    return places - cars


def may_enter(places, cars):
    return places >= cars


def income(tickets):
    total = 0
    for ticket in tickets:
        total += ticket
    return total
