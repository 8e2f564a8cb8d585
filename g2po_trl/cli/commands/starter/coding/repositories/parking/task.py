def price(hours):
    return hours * 2 + 3


def free(places, cars):
    return places - cars


def may_enter(places, cars, is_staff):
    return is_staff or places >= cars + 1


def income(tickets):
    total = 0
    for cars, cost in tickets:
        total += cars * cost
    return total
