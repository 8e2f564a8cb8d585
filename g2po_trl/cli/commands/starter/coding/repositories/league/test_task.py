from task import goals, is_record, points, winner


def test_winner():
    assert winner(1, 1) == "draw"
    assert winner(2, 1) == "home"
    assert winner(1, 2) == "away"


def test_points():
    assert points(2, 1) == 7


def test_goals():
    assert goals([1, 0, 3]) == 4


def test_is_record():
    assert is_record(9, 8)
    assert is_record(8, 8)
    assert not is_record(7, 8)
