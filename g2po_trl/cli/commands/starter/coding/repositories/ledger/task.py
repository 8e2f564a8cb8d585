def total(amounts):
    result = 0
    for amount in amounts:
        result += amount
    return result


def average(amounts):
    return total(amounts) / len(amounts)


def affordable(price, balance):
    return price <= balance
