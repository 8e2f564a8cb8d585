def join(queue, name):
    if name not in queue:
        queue.append(name)
    return queue


def first(queue):
    return queue[0]


def wait(times):
    total = 0
    for minutes in times:
        total += minutes
    return total


def is_full(queue, places):
    return len(queue) >= places
