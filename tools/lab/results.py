"""The table and the picture of a study, from its stored seeds.

    python -m tools.lab.results configs/arms/mechanism.toml data/results/mechanism

Reads FOLDER/seedN.json, and writes FOLDER/table.md and, if the file of arms names measures for it, FOLDER/picture.svg.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from tools.common.errors import UserError, require
from tools.common.files import read_json, write_text
from tools.common.programs import run_program
from tools.lab import table
from tools.lab.study import Study, read_study
from tools.measure.estimates import CONFIDENCE, student
from tools.measure.report_page import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(frame: pd.DataFrame, measures: Sequence[str], arms: Sequence[str]) -> "Figure":
    """A panel for each measure with a line for each arm: the mean over seeds by epoch, and its interval.

    Epoch 0 is imitation, from which all arms begin.
    """
    require("matplotlib", "matplotlib")
    import matplotlib

    matplotlib.rcParams |= {"svg.hashsalt": "spag", "font.size": 9}  # the same file for the same numbers
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(measures), 3.2), layout="constrained")
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for panel, measure in zip(panels, measures, strict=True):
        of_measure = frame[frame.measure == measure]
        for number, arm in enumerate(arms):
            lines = of_measure[of_measure.arm.isin([table.IMITATION, arm])]
            by_epoch = {epoch: student(values.tolist()) for epoch, values in lines.groupby("epoch").value}
            epochs = [epoch + 0.06 * (number - len(arms) / 2) for epoch in by_epoch]  # bars side by side
            means = [mean for mean, _, _ in by_epoch.values()]
            halves = [0 if interval is None else interval[1] - mean for mean, interval, _ in by_epoch.values()]
            colour = COLOURS[number % len(COLOURS)]
            panel.errorbar(epochs, means, halves, label=arm, color=colour, marker="o", markersize=3, capsize=2)
        panel.set(title=measure, xlabel="epoch", xticks=sorted(of_measure.epoch.unique()))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(bottom=0)  # of all panels, when all have their lines
    panels[0].set_ylabel(f"mean over seeds, {CONFIDENCE:.0%} interval")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms), frameon=False)
    return figure


def write_results(study: Study, folder: Path) -> list[Path]:
    """Write the table, and the picture if the study has one; returns their paths. UserError without seeds."""
    seeds = sorted(map(read_json, folder.glob("seed*.json")), key=lambda seed: seed["seed"])
    if not seeds:
        raise UserError(f"{folder}: no seedN.json")
    written = [folder / "table.md"]
    write_text(written[0], table.table_text(seeds, study.primary, study.minus))
    if study.picture:
        written.append(folder / "picture.svg")
        figure = draw(table.to_frame(seeds), study.picture, list(study.arms))
        figure.savefig(written[1], metadata={"Date": None})
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("arms", help="file of arms, such as configs/arms/mechanism.toml")
    parser.add_argument("folder", type=Path, help="folder of the seeds' files")
    given = parser.parse_args()
    print(*write_results(read_study(given.arms, []), given.folder), sep="\n")


if __name__ == "__main__":
    run_program(main)
