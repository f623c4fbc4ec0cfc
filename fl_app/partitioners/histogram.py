"""Label histogram per client of a simulated partition: what the researcher looks at first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_app.partitioners import split_of

if TYPE_CHECKING:
    from fl_app.settings import Settings
    from fl_app.stages import IndexVector, LoadedData

_MOST_LINES = 50
_MOST_LABELS = 20


def label_histogram(settings: Settings, data: LoadedData) -> IndexVector:
    """Returns the rows of each label [population, num_classes] of each client.

    For simulations, whose data are the experimenter's own: a deployed node tells nothing like it.

    Raises:
        SettingsError: the split cannot be made.
    """
    parts = split_of(settings, data)
    num_classes = data.spec.num_classes
    return np.stack([np.bincount(data.train.labels[p], minlength=num_classes) for p in parts])


def to_text(counts: IndexVector) -> str:
    """Returns a table of the first 50 clients and 20 labels, and a summary of all."""
    sizes, shown = counts.sum(axis=1), counts[:_MOST_LINES, :_MOST_LABELS]
    cut = " ..." if counts.shape[1] > _MOST_LABELS else ""
    width = max(5, len(str(counts.max())) + 1)
    lines = ["client   rows  " + "".join(f"{k:>{width}}" for k in range(shown.shape[1])) + cut]
    lines += [
        f"{client:>6} {sizes[client]:>6}  " + "".join(f"{n:>{width}}" for n in row) + cut
        for client, row in enumerate(shown)
    ]
    if len(counts) > _MOST_LINES:
        lines.append(f"... and {len(counts) - _MOST_LINES} more clients (--json has all)")
    labels = (counts > 0).sum(axis=1)
    lines.append(
        f"{len(counts)} clients, rows {sizes.min()} to {sizes.max()} (median "
        f"{np.median(sizes):g}), labels of a client {labels.min()} to {labels.max()}"
    )
    return "\n".join(lines)


def plot(counts: IndexVector, path: Path) -> None:
    """Writes a picture: one bar for each client, one colour for each label."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    clients, below = np.arange(len(counts)), np.zeros(len(counts))
    for label, column in enumerate(counts.T):
        axes.bar(clients, column, bottom=below, width=1.0, label=str(label))
        below += column
    axes.set(xlabel="client", ylabel="training rows")
    if counts.shape[1] <= _MOST_LABELS:
        axes.legend(title="label", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
