"""What all trainings share: rows as tensors, and torch's generator under the batch stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fl_app.stages import IndexVector, Table

_LARGEST_SEED = 2**63


def fetch(table: Table, rows: IndexVector | slice, device: torch.device) -> list[torch.Tensor]:
    """Returns the inputs [B, ...] float32 and labels [B] int64 of `rows` on `device`."""
    inputs = table.transform(table.features[rows])
    labels = torch.from_numpy(np.array(table.labels[rows], dtype=np.int64))
    return [inputs.to(device), labels.to(device)]


@contextmanager
def torch_stream(batches: np.random.Generator, device: torch.device) -> Iterator[None]:
    """Within it torch draws (dropout and the like) from `batches`; afterwards from where it was.

    Covers the CPU and CUDA generators; on other devices a run does not repeat exactly.
    """
    seed = int(batches.integers(_LARGEST_SEED))
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        yield
