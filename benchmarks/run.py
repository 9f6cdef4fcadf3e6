"""Run all benchmarks, each in a process of its own; gather, judge and draw their numbers.

    python benchmarks/run.py --json results/bench.json --png docs/benchmarks.png \\
        --page docs/benchmarks.md
    python benchmarks/run.py --from results/bench.json --png results/bench.png
    python benchmarks/run.py --quick --check benchmarks/floors.json

A check fails if a ratio (a peer's time or memory over pyggml's) lies below the floor that is stored
for it. Floors are ratios only, which are much the same on other machines; times are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import flag_parser, write_json

HERE = Path(__file__).resolve().parent
FLOOR_SHARE = 0.85  # of a measured ratio: what is left for noise and other machines

# Of each theme: its flags, and those of a quick run.
THEMES: dict[str, tuple[list[str], list[str]]] = {
    "peak": ([], ["--sizes", "512", "1024", "--rounds", "5"]),
    "models": (
        [],
        ["--peers", "PyTorch", "JAX", "--rounds", "5", "--turn", "0.1", "--budget", "10",
         "--workloads", "mlp-large", "mlp-middle", "mlp-small", "gpt-small", "cnn", "lstm"],
    ),
    "memory": ([], ["--peers", "PyTorch", "--steps", "100", "1000"]),
    "recording": ([], ["--rounds", "10"]),
    "startup": ([], ["--rounds", "3"]),
    "scaling": ([], ["--rounds", "3", "--turn", "0.02", "--budget", "10", "--points", "3"]),
    "checkpoint": (["--depths", "16", "64"], ["--depths", "16", "--steps", "2"]),
}  # fmt: skip
CHECKED = ["models", "memory"]  # the themes with ratios


def parse_flags() -> argparse.Namespace:
    """Read the command line."""
    parser = flag_parser("Run all benchmarks; gather, judge and draw their numbers.")
    flag = parser.add_argument
    flag("--only", nargs="+", choices=list(THEMES), metavar="THEME", help=", ".join(THEMES))
    flag("--quick", action="store_true", help="short schedules, PyTorch and JAX, no large GPT")
    flag(
        "--from", dest="source", type=Path, metavar="FILE", help="take numbers from an earlier run"
    )
    flag("--png", type=Path, metavar="FILE", help="draw the numbers")
    flag("--page", type=Path, metavar="FILE", help="put tables into this Markdown page")
    flag(
        "--check",
        type=Path,
        metavar="FILE",
        help="fail if a ratio is below its floor; by default, only what has ratios is run",
    )
    flag("--write-floors", type=Path, metavar="FILE",
         help=f"write floors: {FLOOR_SHARE} of the ratios measured")  # fmt: skip
    return parser.parse_args()


def run_theme(theme: str, args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Run one benchmark in a process of its own and return its numbers."""
    print(f"\n==== bench_{theme}.py, {threads} threads", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.json"
        flags = ["--threads", str(threads), "--device", args.device, "--json", str(path)]
        flags += THEMES[theme][args.quick]
        command = [sys.executable, str(HERE / f"bench_{theme}.py"), *flags]
        if subprocess.run(command).returncode:
            sys.exit(f"run.py: bench_{theme}.py failed")
        return json.loads(path.read_text(encoding="utf-8"))


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmarks that are wanted and return the numbers of each."""
    numbers: dict[str, Any] = {"load": os.getloadavg()[0], "threads": args.threads}
    for theme in args.only or (CHECKED if args.check else list(THEMES)):
        if theme == "peak":
            counts = sorted({1, args.threads})
            numbers[theme] = {str(count): run_theme(theme, args, count) for count in counts}
        else:
            numbers[theme] = run_theme(theme, args, args.threads)
    return numbers


# ---- what the numbers say ------------------------------------------------------------------------


class Goal(NamedTuple):
    """A figure, and what it should be: at least that for ratios, at most that for the others."""

    name: str
    value: float
    goal: float
    is_ratio: bool
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the figure is as good as the goal, or better."""
        return self.value >= self.goal if self.is_ratio else self.value <= self.goal


def goals(numbers: dict[str, Any]) -> Iterator[Goal]:
    """Yield every goal for which there is a figure."""
    for result in numbers.get("models", {}).get("results", []):
        if result["best"]:
            name = f"{result['mode']}: {result['title']}, batch {result['batch']}"
            ratio = result["ratios"][result["best"]][1]
            yield Goal(f"{name}, against {result['best']}", ratio, result["goal"], True)
    if "memory" in numbers:
        peaks = numbers["memory"]["peaks"]
        if "PyTorch" in peaks["ratios"]:
            name = f"memory of training {peaks['workload']}, against PyTorch"
            yield Goal(name, peaks["ratios"]["PyTorch"], 1.0, True)
    if "recording" in numbers:
        program, limits = numbers["recording"]["program"], numbers["recording"]["goals"]
        yield Goal("recording an op again", program["record"][1], limits["record"], False, "us")
        yield Goal("finding a plan of 200 ops", program["hit"][1], limits["hit"], False, "us")
        yield Goal("making a plan of 200 ops", program["cold"][1], limits["cold"], False, "us")
    if "startup" in numbers:
        ours, limits = numbers["startup"]["engines"]["pyggml"], numbers["startup"]["goals"]
        yield Goal("import", ours["import"][1], limits["import"], False, "s")
        yield Goal("first step of digits", ours["first_step"][1], limits["first_step"], False, "s")


def shares_of_peak(numbers: dict[str, Any]) -> dict[str, float]:
    """Return the share of our matrix product's peak that each training step reaches."""
    peak = numbers.get("peak", {}).get(str(numbers["threads"]))
    if peak is None:
        return {}
    ceiling = 1e9 * peak["peak"]["pyggml"]
    return {
        result["title"]: result["flops"] / (1e-6 * result["times"]["pyggml"][1]) / ceiling
        for result in numbers.get("models", {}).get("results", [])
        if result["mode"] == "training"
    }


def all_ratios(numbers: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return each peer's ratio to pyggml, by workload."""
    found = {
        f"{result['mode']} {result['workload']}": {
            peer: values[1]
            for peer, values in result["ratios"].items()
            if not peer.startswith("pyggml")  # its own loop
        }
        for result in numbers.get("models", {}).get("results", [])
    }
    if "memory" in numbers:
        peaks = numbers["memory"]["peaks"]
        found[f"memory {peaks['workload']}"] = peaks["ratios"]
    return {name: ratios for name, ratios in found.items() if ratios}


def below_floors(
    ratios: dict[str, dict[str, float]], floors: dict[str, dict[str, float]]
) -> tuple[int, list[str]]:
    """Return how many ratios have a floor, and a line for each that lies below it."""
    compared, below = 0, []
    for name, by_peer in ratios.items():
        for peer, ratio in by_peer.items():
            floor = floors.get(name, {}).get(peer)
            if floor is not None:
                compared += 1
                if ratio < floor:
                    below.append(f"{name}: {peer} / pyggml is {ratio:.2f}, its floor {floor:.2f}")
    return compared, below


# ---- what is written -----------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def model_tables(models: dict[str, Any]) -> Iterator[str]:
    """Yield a table of times and ratios for each mode."""
    results = models["results"]
    peers = list(dict.fromkeys(peer for result in results for peer in result["ratios"]))
    for mode in dict.fromkeys(result["mode"] for result in results):
        rows = []
        for result in results:
            if result["mode"] == mode:
                row = [
                    f"{result['title']}, {result['batch']}",
                    f"{result['times']['pyggml'][1]:,.0f}",
                ]
                for peer in peers:
                    time = result["times"].get(peer)
                    row.append(f"{time[1]:,.0f}" if time else "-")
                best = result["best"]
                row.append(f"{result['ratios'][best][1]:.2f}" if best else "-")
                rows.append(row)
        head = [f"{mode}, batch", "pyggml", *peers, "fastest other / pyggml"]
        yield table(head, rows)


def tables(numbers: dict[str, Any]) -> str:
    """Return all tables in Markdown."""
    about = next(numbers[theme]["about"] for theme in THEMES if "about" in numbers.get(theme, {}))
    said = ", ".join(f"{key} {about[key]}" for key in ("pyggml", "ggml", "Python") if key in about)
    versions = ", ".join(f"{k} {about[k]}" for k in ("PyTorch", "JAX") if k in about)
    parts = [
        f"{said}, {versions or 'no peers'}. CPU: {about['CPU']}; threads: {about['threads']}; load "
        f"of the machine when the run began: {numbers['load']:.1f}.\n"
    ]
    if numbers["load"] > 1:
        parts.append("Other programs were using the machine: its times are too long.\n")
    if "models" in numbers:
        parts += ["Microseconds (medians).\n", *model_tables(numbers["models"])]
    rows = []
    for goal in goals(numbers):
        measured = f"{goal.value:,.0f}" if goal.value >= 100 else f"{goal.value:.3g}"
        measured = f"{measured} {goal.unit}".strip()
        if not goal.name.startswith(("training:", "inference:")):  # these are above
            rows.append([goal.name, measured])
    if rows:
        parts.append(table(["figure", "measured"], rows))
    if shares := shares_of_peak(numbers):
        peaks = [
            f"{count} threads: "
            + ", ".join(f"{name} {value:.0f}" for name, value in peak["peak"].items())
            for count, peak in numbers["peak"].items()
        ]
        parts.append(f"Peak of the matrix product, 10^9 operations a second; {'; '.join(peaks)}.\n")
        rows = [[title, f"{share:.0%}"] for title, share in shares.items()]
        parts.append(table(["training step", "share of pyggml's peak"], rows))
    if "scaling" in numbers:
        rows = []
        for scaled in numbers["scaling"]["tables"]:
            sizes = [str(row["size"]) for row in scaled["rows"]]
            fitted = scaled["exponents"]
            engines = [f"{name} {p:.2f}" for name, p in fitted.items() if name != "planned_bytes"]
            rows.append([f"{scaled['axis']}: {', '.join(sizes)}", ", ".join(engines),
                         f"{fitted['planned_bytes']:.2f}"])  # fmt: skip
        parts.append(table(["sizes", "exponent of the time", "of the planned memory"], rows))
    return "\n".join(parts)


def put_into_page(path: Path, text: str) -> None:
    """Replace what stands between the page's marks."""
    begin, end = "<!-- numbers: run.py -->\n", "\n<!-- /numbers -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"run.py: {path} has no {begin.strip()} and {end.strip()}")
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def main() -> None:
    args = parse_flags()
    if args.source:
        numbers = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        numbers = run_all(args)
    numbers["goals"] = [goal._asdict() | {"is_met": goal.is_met} for goal in goals(numbers)]
    numbers["shares_of_peak"] = shares_of_peak(numbers)
    write_json(args.json, numbers)

    print("\n==== goals")
    for goal in goals(numbers):
        said = "reached" if goal.is_met else "missed "
        print(f"{said} {goal.value:10.3g} {goal.unit:<2} of {goal.goal:<6g} {goal.name}")
    for title, share in numbers["shares_of_peak"].items():
        print(f"{share:.0%} of the matrix product's peak: {title}")
    if args.page:
        put_into_page(args.page, tables(numbers))
    if args.png:
        from draw import draw

        draw(numbers, args.png)
    ratios = all_ratios(numbers)
    if args.write_floors:
        floors = {
            name: {peer: round(FLOOR_SHARE * ratio, 2) for peer, ratio in by_peer.items()}
            for name, by_peer in ratios.items()
        }
        write_json(args.write_floors, floors)
    if args.check:
        floors = json.loads(args.check.read_text(encoding="utf-8"))
        compared, below = below_floors(ratios, floors)
        if not compared:
            sys.exit("run.py: nothing to check: no peer that has floors is installed")
        if below:
            sys.exit("run.py: below the floor:\n" + "\n".join(below))
        print(f"\n{compared} ratios, none below its floor")


if __name__ == "__main__":
    main()
