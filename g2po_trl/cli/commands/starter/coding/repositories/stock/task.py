def pieces(boxes, size):
    return boxes * size


def add(items, name):
    items[name] = items.get(name, 0) + 1
    return items


def missing(items, wanted):
    result = []
    for name in wanted:
        if name not in items:
            result.append(name)
    return result


def enough(pieces, wanted):
    return pieces >= wanted
