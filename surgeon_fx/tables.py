"""Tables of text: by tabulate, or by the plain loop below where tabulate is not installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(
    rows: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
    headers: Sequence[str] | str = (),
    floatfmt: Sequence[str] = (),
    colalign: Sequence[str] = (),
    plain: bool = False,
) -> str:
    """Rows as aligned columns. `headers="keys"` takes the keys of rows that are mappings.

    `floatfmt` has a format per column for floats, `colalign` "left" or "right" per column, `plain` draws no line.
    """
    lines = [list(row.values()) if isinstance(row, Mapping) else list(row) for row in rows]
    if headers == "keys":
        headers = list(rows[0]) if rows and isinstance(rows[0], Mapping) else []
    cells = [[_text(cell, floatfmt[i] if i < len(floatfmt) else "") for i, cell in enumerate(line)] for line in lines]
    numeric = [bool(lines) and all(isinstance(line[i], int | float) for line in lines) for i in range(len(headers))]
    align = list(colalign) or ["right" if number else "left" for number in numeric]
    try:
        from tabulate import tabulate
    except ImportError:
        return _aligned(cells, headers, align)
    style = "plain" if plain else "simple"
    return tabulate(cells, headers, tablefmt=style, disable_numparse=True, colalign=align if cells and align else None)


def _text(cell: Any, form: str) -> str:
    return format(cell, form) if form and isinstance(cell, float) else str(cell)


def _aligned(cells: list[list[str]], headers: Sequence[str], align: Sequence[str]) -> str:
    lines = [list(headers), *cells] if headers else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if headers:
        lines.insert(1, ["-" * width for width in widths])
    right = [i < len(align) and align[i] == "right" for i in range(len(widths))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
