def is_child(age):
    return age <= 12


def price(age):
    return 5 if is_child(age) else 9


def seats(rows, width):
    return rows * width - 2


def has_place(sold, size):
    return sold <= size - 1


def ticket_sum(ages):
    cost = 0
    for age in ages:
        cost += price(age)
    return cost
