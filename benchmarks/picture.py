"""The picture of a replay record: tokens per step against mean nodes, honesty by source, speed by workload.

python benchmarks/picture.py record/replay-DATE.json replay.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from redraft.retrieval.errors import import_extra

__all__ = ["draw"]

_COLOURS = {"redraft": "#c2410c", "redraft + index": "#7c2d12", "arctic": "#2563eb", "ngram": "#6b7280"}
_FEWEST_NODES = 200  # a reliability bin with fewer says nothing


def draw(record: dict, file: Path) -> None:
    """Write the picture of a record of benchmarks/replay.py to `file` (its ending says in which format)."""
    matplotlib = import_extra("matplotlib", "dev")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = record["results"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 5), layout="constrained")
    _tokens_against_nodes(left, results)
    _reliability(middle, results.get("redraft + index", results["redraft"])["pooled"])
    _speed(right, results)
    figure.suptitle(f"{record['date']}, {record['machine']}", fontsize=9, color="#555555")
    figure.savefig(file, dpi=110)


def _tokens_against_nodes(axes, results: dict) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, result in results.items():
        family, at, _ = name.partition(" @ ")
        point = (result["macro"]["nodes_per_step"], result["macro"]["tokens_per_step"])
        if at:
            curves.setdefault(family, []).append(point)
        else:
            colour = _COLOURS[_family(name)]
            axes.plot(*point, "o", color=colour)
            axes.annotate(name, point, textcoords="offset points", xytext=(6, -3), fontsize=8, color=colour)
    for family, points in curves.items():
        axes.plot(*zip(*sorted(points)), "-", color=_COLOURS[family], label=family)
    axes.set(xlabel="mean nodes per step", ylabel="tokens per step", title="What a node buys (macro mean)")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(loc="lower right", fontsize=8)


def _reliability(axes, pooled: dict) -> None:
    axes.plot([0, 1], [0, 1], ":", color="#999999")
    for name, source in pooled["sources"].items():
        bins = [b for b in source["reliability"] if b["nodes"] >= _FEWEST_NODES]
        if bins:
            label = f"{name} (ECE {source['calibration_error']:.3f})"
            axes.plot([b["promised"] for b in bins], [b["accepted"] for b in bins], ".-", label=label)
    title = f"Promised and kept, visited nodes (ECE {pooled['calibration_error']:.3f})"
    axes.set(xlabel="probability promised", ylabel="share accepted", title=title, xlim=(0, 1), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _speed(axes, results: dict) -> None:
    shown = [name for name in ("redraft", "redraft + index", "redraft lean", "arctic best") if name in results]
    workloads = list(results[shown[0]]["workloads"])
    height = 0.8 / len(shown)
    shade = {"redraft lean": "#fdba74"}
    for number, name in enumerate(shown):
        rows = [results[name]["workloads"][workload]["draft_us"] for workload in workloads]
        places = [place + number * height for place in range(len(workloads))]
        colour = shade.get(name, _COLOURS[_family(name)])
        axes.barh(places, [row["p50"] for row in rows], height, color=colour, label=name)
        axes.plot([row["p99"] for row in rows], places, "|", color=colour)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(workloads))], workloads, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="microseconds per draft: p50 (bar), p99 (tick)", title="Speed", xscale="log")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="x")


def _family(name: str) -> str:
    if name.startswith("redraft"):
        return "redraft + index" if name.endswith("index") else "redraft"
    return "arctic" if name.startswith("arctic") else "ngram"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
