"""Evaluation on the server's public test rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app.errors import DataError
from fl_app.stages import Table
from fl_app.training._batches import fetch


@torch.no_grad()
def evaluate(
    model: nn.Module, table: Table, device: torch.device, batch_size: int = 1024
) -> dict[str, float]:
    """Returns ``accuracy`` in [0, 1] and ``loss`` (mean cross-entropy, nats) over `table`.

    Only for public rows: both numbers are exact. The model's training mode is restored.

    Raises:
        DataError: `table` has no row.
    """
    num_rows = len(table.labels)
    if num_rows == 0:
        raise DataError("test rows=0: evaluation needs at least one; choose another dataset")
    was_training = model.training
    model.to(device).eval()
    correct, loss = 0, 0.0
    for start in range(0, num_rows, batch_size):
        inputs, labels = fetch(table, slice(start, start + batch_size), device)
        logits = model(inputs)
        correct += int((logits.argmax(dim=1) == labels).sum())
        loss += float(cross_entropy(logits.float(), labels, reduction="sum"))
    model.train(was_training)
    return {"accuracy": correct / num_rows, "loss": loss / num_rows}
