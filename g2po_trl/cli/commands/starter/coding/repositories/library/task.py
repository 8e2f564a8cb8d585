def lend(shelf, book):
    if book in shelf:
        shelf.remove(book)
    return shelf


def fine(days):
    return days * 2 if days >= 3 else 0


def title(book):
    return book[0].upper() + book[1:]


def is_new(year, now):
    return year == now or year == now - 1
