from task import has_place, is_child, price, seats, ticket_sum


def test_is_child():
    assert is_child(4)
    assert is_child(12)
    assert not is_child(13)


def test_price():
    assert price(8) == 5
    assert price(40) == 9


def test_seats():
    assert seats(5, 4) == 18


def test_has_place():
    assert has_place(3, 9)
    assert has_place(8, 9)
    assert not has_place(9, 9)


def test_ticket_sum():
    assert ticket_sum([8, 40]) == 14
