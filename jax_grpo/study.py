"""The study's account: from runs of several methods and seeds to a table, a file and a picture.

Every number comes with how far it can be trusted. Over seeds that is Student's t interval of the
seeds' means, which holds for the method; of one model it is Wilson's interval over the prompts that
it was asked, which holds for that model alone. Both are of 95 %.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
Z = 1.959964  # 97.5 % of the normal distribution
# The same of Student's t, by degrees of freedom from 1.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


class Run(NamedTuple):
    """One method with one seed."""

    method: str
    seed: int
    before: Mapping[str, float]  # measures of the base, as `evaluate` names them
    after: Mapping[str, float]
    seconds: float
    sampled_tokens: int
    optimizer_tokens: int  # prompts included, once for each pass
    memory: Mapping[str, Any]  # the fields of a `Memory` at the method's peak, and `during` what
    curves: Mapping[str, Mapping[int, float]]  # of each metric, its value by step


class Interval(NamedTuple):
    """A mean, and between what it lies; NaN where nothing says."""

    mean: float
    low: float
    high: float


# ---------------------------------------------------------------------------------- the statistics


def wilson_interval(share: float, count: int) -> Interval:
    """Between what the true share lies when `share` of `count` draws were right.

        (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n)

    Wilson, 1927, "Probable Inference, the Law of Succession, and Statistical Inference".

    >>> [round(x, 3) for x in wilson_interval(0.5, 100)], round(wilson_interval(1.0, 10).low, 3)
    ([0.5, 0.404, 0.596], 0.722)
    """
    centre, square = share + Z**2 / (2 * count), Z**2 / count
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return Interval(share, (centre - half) / (1 + square), (centre + half) / (1 + square))


def student_interval(values: Sequence[float]) -> Interval:
    """Between what the true mean lies, by Student's t; NaN of a single value.

        m ± t s / √n,  s the unbiased standard deviation and t of n - 1 degrees of freedom

    "Student", 1908, "The Probable Error of a Mean".

    >>> [round(x, 3) for x in student_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Interval(mean, math.nan, math.nan)
    half = student_quantile(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def student_quantile(freedom: int) -> float:
    """97.5 % of Student's t: tabled up to 9, then by Fisher's expansion, right to 3 places.

    >>> student_quantile(2), round(student_quantile(10), 3), round(student_quantile(30), 3)
    (4.3027, 2.228, 2.042)
    """
    if freedom <= len(T):
        return T[freedom - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def interval(values: Sequence[float], prompts: int) -> Interval:
    """Of a share, over seeds where there are several, else over prompts; within 0 and 1."""
    one = len(values) == 1
    mean, low, high = wilson_interval(values[0], prompts) if one else student_interval(values)
    return Interval(mean, max(low, 0.0), min(high, 1.0))


def by_method(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each method, in the order in which they come."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    return methods


# --------------------------------------------------------------------------------------- the table


def table(runs: Sequence[Run], measure: str, prompts: int) -> str:
    """What came out, as Markdown.

    Args:
      runs: of all methods and seeds.
      measure: the name of a share in `before` and `after`, such as `accuracy`.
      prompts: how many it was measured on.
    """
    shares = {f"{measure} greedy": f"{measure}_greedy", f"{measure} sampled": measure}
    for name in runs[0].after:
        if name.startswith(f"{measure}_pass@"):
            shares[name.removeprefix(f"{measure}_")] = name
    spent = ("seconds", "sampled_tokens", "optimizer_tokens")

    def measured(some: Sequence[Run]) -> list[str]:
        found = [interval([run.after[name] for run in some], prompts) for name in shares.values()]
        length = np.mean([run.after["mean_length"] for run in some])
        return [*map(_cell, found), f"{length:.1f}"]

    base = runs[0]._replace(after=runs[0].before)
    rows = [["base", *measured([base]), *[""] * (len(spent) + 1)]]
    for method, some in by_method(runs).items():
        means = [np.mean([getattr(run, name) for run in some]) for name in spent]
        memory = _bytes(some[0].memory["total"])
        rows.append([method, *measured(some), *(f"{mean:,.0f}" for mean in means), memory])
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in runs))
    note = f"On {prompts} held-out prompts; means over seeds {seeds}, and 95 % intervals: "
    note += "Student's over seeds, and of a single model Wilson's over prompts."
    costs = [name.replace("_", " ") for name in (*spent, "memory")]
    drawn = _markdown(["method", *shares, "length", *costs], rows)
    return "\n".join([drawn, "", note, "", *ranking(runs, measure)])


def ranking(runs: Sequence[Run], measure: str) -> list[str]:
    """From the best method to the worst, by how much each is better than the next, seed by seed."""
    methods = by_method(runs)
    values = {
        method: {run.seed: run.after[measure] for run in some} for method, some in methods.items()
    }
    order = sorted(values, key=lambda method: -np.mean(list(values[method].values())))
    lines = []
    for better, worse in zip(order, order[1:], strict=False):
        shared = values[better].keys() & values[worse].keys()
        found = student_interval([values[better][s] - values[worse][s] for s in sorted(shared)])
        sure = "" if math.isnan(found.low) or found.low > 0 else ": no clear difference"
        lines.append(f"- {better} over {worse} by {_cell(found)}{sure}")
    return [f"By sampled {measure}, seed by seed:", "", *lines] if lines else []


def memory_table(memories: Mapping[str, Mapping[str, Any]]) -> str:
    """What each method holds at its peak, as Markdown.

    Args:
      memories: by method, the fields of a `Memory`, and `during`, the function that holds it.
    """
    names = ("arguments", "temporaries", "outputs", "aliases", "beside")
    most = max(memory["total"] for memory in memories.values())
    rows = [
        [
            method,
            memory["during"],
            *(_bytes(memory[name]) for name in (*names, "total")),
            f"{memory['total'] / most:.0%}",
        ]
        for method, memory in memories.items()
    ]
    header = ["method", "peak during", *names, "total", "of the most"]
    note = "On each device, by the compiler's account: total = arguments + temporaries + outputs "
    note += "- aliases (outputs in the place of donated arguments) + beside (models that are held "
    note += "but not taken)."
    return "\n".join([_markdown(header, rows), "", note])


def _cell(interval: Interval) -> str:
    text = f"{interval.mean:.3f}"
    if not math.isnan(interval.low):
        text += f" ({interval.low:.3f} to {interval.high:.3f})"
    return text


def _bytes(count: int) -> str:
    """A number of bytes in the unit that a person would choose."""
    units = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]
    size, unit = next(((s, u) for s, u in units if count >= s), (1, "B"))
    return f"{count / size:.4g} {unit}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that is legible as text, too: first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])])
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


# --------------------------------------------------------------------------------- the other files


def write_csv(file: Path, runs: Sequence[Run]) -> None:
    """One row for each method and seed, with all that was measured but the curves."""
    rows = []
    for run in runs:
        plain = {name: getattr(run, name) for name in Run._fields[:2] + Run._fields[4:7]}
        measured = {"before": run.before, "after": run.after, "memory": run.memory}
        plain |= {f"{when}/{k}": v for when, values in measured.items() for k, v in values.items()}
        rows.append(plain)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(rows)


def check_plotting() -> None:
    """Refuses to begin what could not be drawn at the end.

    Raises:
      ImportError: without matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ImportError("study.png needs matplotlib: pip install 'jax_grpo[study]'") from None


def draw(file: Path, runs: Sequence[Run], measure: str, prompts: int) -> None:
    """Bars of the measure for each method, and a panel for each metric of the curves.

    Args:
      file: a PNG.
      runs: as of `table`, and the two that follow.
      measure: which.
      prompts: how many it was measured on.
    """
    from matplotlib.figure import Figure

    methods = by_method(runs)
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.curves))
    panels = 1 + len(metrics)
    columns = min(panels, 3)
    shape = (-(-panels // columns), columns)
    figure = Figure(figsize=(5 * shape[1], 3.8 * shape[0]), dpi=150, layout="constrained")
    axes = list(np.ravel(figure.subplots(*shape)))
    _draw_bars(axes[0], methods, measure, prompts)
    for axis, metric in zip(axes[1:], metrics, strict=False):
        _draw_curves(axis, methods, metric)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[panels:]:
        axis.set_visible(False)
    figure.savefig(file)


def _draw_bars(axis: Any, methods: Mapping[str, list[Run]], measure: str, prompts: int) -> None:
    """Greedy and sampled for each method; the base's are the first two."""
    base = next(iter(methods.values()))[0].before
    places, width = np.arange(1 + len(methods)), 0.38
    kinds = ((f"{measure}_greedy", "greedy", -0.5), (measure, "sampled", 0.5))
    for colour, (name, label, shift) in zip(COLOURS, kinds, strict=False):
        found = [interval([base[name]], prompts)]
        found += [interval([run.after[name] for run in some], prompts) for some in methods.values()]
        mean, low, high = np.transpose(found)
        reach = np.maximum([mean - low, high - mean], 0)
        style = {"capsize": 3, "error_kw": {"linewidth": 1}}
        at = places + shift * width
        axis.bar(at, mean, width, yerr=reach, color=colour, label=label, **style)
    axis.set_xticks(places, ["base", *methods])
    axis.set(ylim=(0, 1.18), yticks=np.linspace(0, 1, 6), title=f"held-out {measure}")
    axis.legend(loc="upper left", ncols=2, frameon=False)


def _draw_curves(axis: Any, methods: Mapping[str, list[Run]], metric: str) -> None:
    """A line for each method, the mean over seeds, with the range of the seeds shaded."""
    for i, (method, some) in enumerate(methods.items()):
        curves = [run.curves[metric] for run in some if run.curves.get(metric)]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = np.array([[curve[step] for step in steps] for curve in curves])
        colour = COLOURS[i % len(COLOURS)]
        axis.plot(steps, values.mean(0), color=colour, label=method)
        axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="step", title=metric)
    axis.legend(frameon=False)
