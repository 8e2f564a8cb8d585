def length(songs):
    total = 0
    for minutes, rest in songs:
        total += minutes * 60 + rest
    return total


def is_duo(players):
    return len(players) == 2


def last(songs):
    return songs[len(songs) - 1]


def can_play(name, known, years):
    return name in known or years >= 10
