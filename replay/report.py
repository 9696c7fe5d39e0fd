"""Replay results as plain text tables."""

from __future__ import annotations

__all__ = ["sources_table", "table", "workloads_table"]

_HEADER = ("workload", "tokens/step", "no loops", "in loops", "nodes", "accepted", "ECE",
           "draft p50", "p99", "commit", "open", "close")  # fmt: skip


def table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    """Columns as wide as they need to be, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [list(header), *rows]) for column in range(len(header))]
    lines = []
    for row in [list(header), *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join(lines)


def workloads_table(rows: dict[str, dict], mean: dict) -> str:
    """One line for each workload's summary (`Tally.summary`), and the macro mean below."""
    return table(_HEADER, [_cells(name, row) for name, row in [*rows.items(), ("macro mean", mean)]])


def sources_table(pooled: dict) -> str:
    """One line for each source of drafts, over the steps of all workloads together."""
    rows = []
    for name, row in pooled["sources"].items():
        drafted, accepted = row["nodes_per_step"], row["accepted_per_step"]
        rows.append([name, _number(drafted, 3), _number(accepted, 3), _share(accepted / drafted),
                     _number(row["calibration_error"], 3)])  # fmt: skip
    return table(("source", "nodes/step", "accepted/step", "accepted", "ECE"), rows)


def _cells(name: str, row: dict) -> list[str]:
    return [
        name,
        _number(row["tokens_per_step"], 3),
        _number(row["tokens_per_step_outside_loops"], 3),
        _share(row["share_in_loops"]),
        _number(row["nodes_per_step"], 1),
        _share(row["accepted_share"]),
        _number(row["calibration_error"], 3),
        _number(row["draft_us"]["p50"], 1),
        _number(row["draft_us"]["p99"], 1),
        _number(row["commit_us_per_token"]["mean"], 2),
        _number(row["open_us_per_token"]["mean"], 2),
        _number(row["close_us_per_token"]["mean"], 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
