from task import area, fits, is_square, perimeter


def test_area():
    assert area(3, 4) == 12


def test_perimeter():
    assert perimeter(3, 4) == 14


def test_is_square():
    assert is_square(2, 2)
    assert not is_square(2, 3)


def test_fits():
    assert fits(2, 3, 4)
    assert fits(4, 4, 4)
    assert not fits(2, 5, 4)
    assert not fits(5, 2, 4)
