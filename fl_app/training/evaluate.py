"""Evaluation on the server's public test rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app.errors import DataError
from fl_app.stages import IndexVector, Table
from fl_app.training._batches import fetch, layout_of


@torch.no_grad()
def evaluate(
    model: nn.Module, table: Table, device: torch.device, batch_size: int = 1024
) -> dict[str, float]:
    """Returns ``accuracy`` in [0, 1] and ``loss`` (mean cross-entropy, nats) over `table`.

    With two classes that are both there, also ``auc``: the area under the curve of true against
    false positives (0.5: chance), label 1 being positive.

    Only for public rows: both numbers are exact. The model's training mode is restored.

    Raises:
        DataError: `table` has no row.
    """
    num_rows = len(table.labels)
    if num_rows == 0:
        raise DataError("test rows=0: evaluation needs at least one; choose another dataset")
    was_training = model.training
    model.to(device).eval()
    lay_out = layout_of(model)
    correct, loss = 0, 0.0
    margins: list[torch.Tensor] = []
    for start in range(0, num_rows, batch_size):
        inputs, labels = fetch(table, slice(start, start + batch_size), device)
        logits = model(lay_out(inputs))
        correct += int((logits.argmax(dim=1) == labels).sum())
        loss += float(cross_entropy(logits.float(), labels, reduction="sum"))
        if logits.shape[1] == 2:
            margins.append((logits[:, 1] - logits[:, 0]).double().cpu())
    model.train(was_training)
    metrics = {"accuracy": correct / num_rows, "loss": loss / num_rows}
    if margins and len(np.unique(table.labels)) == 2:
        metrics["auc"] = _area_under_curve(torch.cat(margins), table.labels)
    return metrics


def _area_under_curve(margins: torch.Tensor, labels: IndexVector) -> float:
    """Returns the AUC; the NaN of a model that has diverged counts as no preference."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, torch.nan_to_num(margins).numpy()))
