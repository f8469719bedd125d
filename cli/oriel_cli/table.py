"""The plain-text tables of the command line. Pure: values in, lines out."""

from collections.abc import Collection, Sequence


def columns(heading: Sequence[str], rows: Sequence[Sequence[object]], *, right: Collection[int] = ()) -> list[str]:
    """Lines of a table with two blanks between columns; `right` are the indices of right-aligned columns."""
    cells = [list(heading), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(heading))]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def printable(value: object) -> str:
    """Make a text from elsewhere fit for a terminal: one line of printable characters, at most 600."""
    text = " ".join(str(value if value is not None else "").split())[:600]
    return "".join(each if each.isprintable() else "?" for each in text)
