"""The picture of a run: ratios to the peers, share of the peak, growth with size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

BLUE, ORANGE, GREEN, GREY, BLACK = "#3366aa", "#dd7722", "#44995a", "#888888", "#222222"
COLOURS = {
    "pyggml": BLACK,
    "pyggml, loop": GREY,
    "PyTorch": ORANGE,
    "torch.compile": GREEN,
    "JAX": BLUE,
}


def draw_ratios(axes: Any, results: list[dict[str, Any]], mode: str) -> None:
    """Draw each peer's time over pyggml's, quartiles as bars, and the goals as short lines."""
    shown = [result for result in results if result["mode"] == mode][::-1]
    used = set()
    for y, result in enumerate(shown):
        peers = list(result["ratios"])
        for i, peer in enumerate(peers):
            low, middle, high = result["ratios"][peer]
            place = y - 0.18 * (i - (len(peers) - 1) / 2)
            label = None if peer in used else peer
            used.add(peer)
            axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o",
                          color=COLOURS[peer], markersize=5, label=label)  # fmt: skip
        axes.plot([result["goal"]] * 2, [y - 0.38, y + 0.38], color=GREY, linewidth=1.5,
                  label="goal" if y == 0 else None)  # fmt: skip
    axes.axvline(1.0, color=BLACK, linewidth=0.8)
    values = [value for result in shown for ratio in result["ratios"].values() for value in ratio]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2 if max(values) < 64 * min(values) else 10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(shown)), [f"{r['title']}, batch {r['batch']}" for r in shown])
    axes.set_title(f"{mode}: the other's time / pyggml's\n(right of 1, pyggml is faster)")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(frameon=False, loc="best", fontsize="small")


def draw_shares(axes: Any, shares: dict[str, float]) -> None:
    """Draw the share of the matrix product's peak that each training step reaches."""
    titles = list(shares)[::-1]
    axes.barh(titles, [shares[title] for title in titles], color=BLUE, height=0.55)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(0, max(1.0, *shares.values()))
    axes.set_title("training: share of the peak\nof the matrix product")
    axes.grid(axis="x", alpha=0.25)


def draw_growth(axes: Any, scaled: dict[str, Any]) -> None:
    """Draw times against one size, with the exponents that were fitted."""
    sizes = [row["size"] for row in scaled["rows"]]
    for name, power in scaled["exponents"].items():
        if name != "planned_bytes":
            milliseconds = [row[name] / 1e3 for row in scaled["rows"]]
            label = f"{name}: {scaled['axis']}^{power:.2f}"
            axes.plot(sizes, milliseconds, "o-", color=COLOURS[name], label=label, markersize=4)
    planned = [row["planned_bytes"] / 2**20 for row in scaled["rows"]]
    power = scaled["exponents"]["planned_bytes"]
    axes.plot(sizes, planned, "s:", color=GREY, label=f"planned: {scaled['axis']}^{power:.2f}",
              markersize=4)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel=scaled["axis"], ylabel="ms a step; MiB planned")
    axes.set_xticks(sizes, map(str, sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(f"GPT step against {scaled['axis']}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Draw a run's numbers, as many of them as there are, into a PNG."""
    results = numbers.get("models", {}).get("results", [])
    compared = list(dict.fromkeys(r["mode"] for r in results if r["ratios"]))
    shares = numbers["shares_of_peak"]
    growth = numbers.get("scaling", {}).get("tables", [])
    above = len(compared) + bool(shares)
    rows = bool(above) + bool(growth)
    if not rows:
        return
    figure = Figure(figsize=(16, 5 * rows), layout="constrained")
    parts = list(figure.subfigures(rows, 1, squeeze=False)[:, 0])
    if above:
        panels = list(parts.pop(0).subplots(1, above, squeeze=False)[0])
        for mode in compared:
            draw_ratios(panels.pop(0), results, mode)
        if shares:
            draw_shares(panels.pop(0), shares)
    if growth:
        for axes, scaled in zip(parts[0].subplots(1, len(growth), squeeze=False)[0], growth,
                                strict=True):  # fmt: skip
            draw_growth(axes, scaled)
    for axes in figure.get_axes():
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{os.getpid()}-{path.name}")  # complete before it takes its place
    figure.savefig(beside, dpi=110)
    os.replace(beside, path)
