def trays(rolls, size):
    return (rolls + size - 1) // size


def unsold(baked, sold):
    rest = []
    for bread in baked:
        if bread not in sold:
            rest.append(bread)
    return rest


def change(paid, cost):
    return paid - cost if paid >= cost else 0


def is_open(hour, is_holiday):
    return hour >= 6 and not is_holiday
