"""Every model plug-in: the clipped sums that training uses equal those by Opacus' own hooks.

In float64: in float32 rounding decides which of two nearly equal values a pooling passes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from opacus import GradSampleModule
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import plugins, rng
from fl_app.models import build_model
from fl_app.privacy import NoiseKind
from fl_app.stages import InputSpec
from fl_app.training._opacus import NoisySGD, _OutOfPlace, per_sample_gradients

REPO = Path(__file__).resolve().parents[2]
IMAGES = InputSpec(shape=(3, 32, 32), num_classes=10)
TEXT = InputSpec(shape=(20,), num_classes=90, vocabulary=90)
ROWS = 3


def shipped(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns the model as it is shipped, without dropout, and a batch."""
    values = yaml.safe_load((REPO / "conf" / "model" / f"{kind}.yaml").read_text(encoding="utf-8"))
    model: plugins.Model = plugins.build("model", values)
    spec = TEXT if model.takes_tokens else IMAGES
    network = build_model(model, spec, seed=0, private=True).train().double()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, *spec.shape, generator=generator, dtype=torch.float64)
    if spec.vocabulary is not None:
        inputs = torch.randint(spec.vocabulary, (ROWS, *spec.shape), generator=generator)
    return network, inputs, torch.tensor([1, 5, 3])


def opacus_sums(
    network: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, bounds: dict[int, float]
) -> dict[int, np.ndarray]:
    """Returns the sums [P] of gradients by Opacus' hooks, clipped in NumPy, for each norm."""
    wrapped = GradSampleModule(network, loss_reduction="sum")
    with _OutOfPlace():
        scores = wrapped(inputs)
    cross_entropy(scores, labels, reduction="sum").backward()
    samples: list[Any] = [p.grad_sample for p in network.parameters()]  # type: ignore[attr-defined]
    grads_BP = np.concatenate([s.flatten(1).numpy() for s in samples], axis=1)
    wrapped.to_standard_module()
    sums = {}
    for order, bound in bounds.items():
        norms_B1 = np.linalg.norm(grads_BP, order, axis=1, keepdims=True)
        sums[order] = (grads_BP * np.minimum(1.0, bound / norms_B1)).sum(0)
    return sums


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", plugins.kinds("model"))
def test_clipped_sums_equal_those_by_opacus_hooks(kind: str) -> None:
    network, inputs, labels = shipped(kind)
    bounds = {1: 5.0, 2: 0.1}
    expected = opacus_sums(network, inputs, labels, bounds)
    for order, noise in ((1, NoiseKind.LAPLACE), (2, NoiseKind.GAUSSIAN)):
        with per_sample_gradients(network) as wrapped:
            optimizer = NoisySGD(
                torch.optim.SGD(network.parameters(), lr=1.0), noise_multiplier=0.0,
                clipping_norm=bounds[order], denominator=1.0, kind=noise,
                noise=rng.noise_source("test", seed=0),
            )  # fmt: skip
            optimizer.num_rows = ROWS
            cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
            optimizer.clip_and_accumulate()
            got = torch.cat([p.summed_grad.flatten() for p in network.parameters()]).numpy()  # type: ignore[attr-defined]
        error = np.linalg.norm(got - expected[order]) / np.linalg.norm(expected[order])
        # NoisySGD clips to 2**-20 less than C, and no more than that may show.
        assert error <= 1e-6, f"{kind}, L{order}: {error:.1e}"
