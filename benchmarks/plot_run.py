"""Draws the curves of a run: reward and format, accuracy, length, KL.

python benchmarks/plot_run.py WORKDIR PICTURE.png        (needs matplotlib)
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main(workdir: str, picture: str) -> None:
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    steps = [row["step"] for row in rows]
    curves = {
        "reward": ["reward", "rewards/correctness/mean", "rewards/thinking/mean"],
        "completion length (tokens)": ["completions/mean_length"],
        "KL to the reference (nats per token)": ["kl"],
    }
    figure, axes = plt.subplots(1, len(curves), figsize=(12, 3.2), constrained_layout=True)
    for axis, (title, names) in zip(axes, curves.items(), strict=True):
        for name in names:
            label = name.removeprefix("rewards/").removesuffix("/mean")
            axis.plot(steps, [row[name] for row in rows], label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("GRPO step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
