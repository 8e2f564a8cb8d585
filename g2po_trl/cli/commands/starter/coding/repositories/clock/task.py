def minutes(hours, rest):
    return hours * 60 + rest


def is_open(hour):
    return hour >= 9 and hour <= 17


def half(hours):
    return hours / 2


def is_noon(hour, minute):
    return hour == 12 and minute == 0
