"""What all trainings share: rows as tensors, and torch's generator under the batch stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from fl_app.stages import IndexVector, Table

_LARGEST_SEED = 2**63


def fetch(
    table: Table,
    rows: IndexVector | slice,
    device: torch.device,
    batches: np.random.Generator | None = None,
) -> list[torch.Tensor]:
    """Returns the inputs [B, ...] (float32, or int64 tokens) and labels [B] int64 of `rows`.

    Args:
        table: where the rows are.
        rows: numbers of the rows.
        device: where the result goes.
        batches: for training, the job's stream, which the table's augmentation draws from; None:
            the rows as they are.
    """
    stored = table.features[rows]
    if batches is not None and table.augmentation is not None:
        stored = table.augmentation(stored, batches)
    inputs = table.transform(stored)
    labels = torch.from_numpy(np.array(table.labels[rows], dtype=np.int64))
    return [inputs.to(device), labels.to(device)]


def channels_last(images: Tensor) -> Tensor:
    """Returns `images` with the channels innermost; a convolution then hands them on so."""
    images = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    # One channel leaves the order open, and torch would read it as channels outermost.
    strides = (height * width * channels, 1, width * channels, channels)
    return images.as_strided(images.shape, strides)


def layout_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns what puts inputs [B, ...] into the memory order that `model` takes least time with.

    On the CPU that is images with the channels innermost, but not before a group normalization.
    """
    if any(isinstance(module, nn.GroupNorm) for module in model.modules()):
        return lambda inputs: inputs
    return lambda inputs: (
        channels_last(inputs) if inputs.dim() == 4 and inputs.device.type == "cpu" else inputs
    )


def decayed(learning_rate: float, decay: float, round: int) -> float:
    """Returns the learning rate of `round` (from 1): it is multiplied by `decay` every round."""
    return learning_rate * decay ** (round - 1)


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
