def passed(points):
    return points >= 50


def best(grades):
    top = grades[0]
    for grade in grades:
        if grade >= top:
            top = grade
    return top


def passes(grades):
    count = 0
    for grade in grades:
        if passed(grade):
            count += 1
    return count
