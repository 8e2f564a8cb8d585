from task import best, passed, passes


def test_passed():
    assert passed(80)
    assert passed(50)
    assert not passed(49)


def test_best():
    assert best([40, 90, 60]) == 90
    assert best([30]) == 30


def test_passes():
    assert passes([40, 90, 60]) == 2
