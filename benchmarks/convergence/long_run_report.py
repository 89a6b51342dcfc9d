def write_report(rows):
    return []


def draw(rows, path):
    pass
