def winner(home, away):
    if home == away:
        return "draw"
    return "home" if home >= away else "away"


def points(wins, draws):
    return wins * 3 + draws


def goals(games):
    number = 0
    for game in games:
        number += game
    return number


def is_record(score, best):
    return score >= best
