"""Per-sample gradients by our own rules: equal to one backward pass a row, never above C."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d

from fl_app import rng
from fl_app.errors import ModelError
from fl_app.privacy import NoiseKind
from fl_app.stages import InputSpec
from fl_app.training._fast_gradients import (
    Dense,
    Outer,
    SampleGradients,
    _MaxPool2x2,
    sample_gradients,
)
from fl_app.training._opacus import NoisySGD, check_per_sample, per_sample_gradients

ROWS = 5
IMAGE = (4, 9, 7)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


class Last(nn.Module):
    """Flattens, and gives 3 scores."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.output = inside, nn.LazyLinear(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.output(torch.tanh(self.inside(x)).flatten(1))
        return scores


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice: torch.Tensor = self.layer(torch.tanh(self.layer(x)))
        return twice


class Shares(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return shared


class Recurrent(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.lstm = DPLSTM(7, 6, num_layers=2, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.lstm(x.flatten(1, 2))[0]
        return hidden


def frozen_bias() -> nn.Module:
    layer = nn.Linear(7, 5)
    assert layer.bias is not None
    layer.bias.requires_grad_(False)
    return layer


def conv(*sizes: int, **options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(*sizes, **options)  # type: ignore[arg-type]


def pooled(*options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.MaxPool2d(*options))  # type: ignore[arg-type]


FAST = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(252, 5)),
    "linear without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(252, 5, bias=False)),
    "linear over positions": lambda: nn.Linear(7, 5),
    "linear called twice": lambda: Twice(nn.Linear(7, 7)),
    "conv, wide rows": conv(4, 2, 3),
    "conv, many channels": conv(4, 6, (2, 5)),
    "conv without bias": conv(4, 6, 3, bias=False),
    "conv 1 x 1": conv(4, 6, 1),
    "conv, stride and padding": conv(4, 6, (3, 4), stride=(2, 1), padding=(2, 1)),
    "conv, dilation": conv(4, 6, (3, 2), dilation=(2, 3), padding=1),
    "conv, groups": conv(4, 6, 3, groups=2, stride=2),
    "conv, depthwise": conv(4, 8, 3, groups=4, padding=1),
    # Opacus' own rule pads these with equal rims of zeros.
    "conv, circular": conv(4, 6, 3, padding=(2, 1), padding_mode="circular"),
    "conv, same": conv(4, 6, (2, 4), padding="same", dilation=(1, 2)),
    "conv, valid": conv(4, 6, 2, padding="valid"),
    "conv called twice": lambda: Twice(nn.Conv2d(4, 4, 3, padding=1)),
    "pooled": pooled(2),
    "pooled without a rule": pooled(3, 2, 1),
    "lstm": Recurrent,
    "lstm both ways": lambda: Recurrent(bidirectional=True),
}
OPACUS = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "layer norm": lambda: nn.LayerNorm(7),
    "one weight, two layers": Shares,
    "frozen bias": frozen_bias,
    "conv in 1-d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 3)),
}


def data(num_rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, *IMAGE, generator=generator), torch.arange(num_rows) % 3


def network(make: Callable[[], nn.Module]) -> nn.Module:
    model = seeded(lambda: Last(make()))
    with torch.no_grad():
        model(data()[0])  # sizes the last layer
    return model


def optimizer(model: nn.Module, clipping_norm: float, kind: NoiseKind) -> NoisySGD:
    return NoisySGD(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        noise_multiplier=0.0,
        clipping_norm=clipping_norm,
        denominator=1.0,
        noise=rng.noise_source("test", seed=0),
        kind=kind,
    )


def clipped_sum(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, clipping_norm: float, order: int
) -> torch.Tensor:
    """Returns what `NoisySGD` sums [P], in the order of the trainable parameters."""
    kind = NoiseKind.LAPLACE if order == 1 else NoiseKind.GAUSSIAN
    with per_sample_gradients(model) as wrapped:
        clipped = optimizer(model, clipping_norm, kind)
        clipped.num_rows = len(inputs)
        cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
        clipped.clip_and_accumulate()
        return torch.cat([p.summed_grad.flatten() for p in clipped.params])


def one_by_one(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, clipping_norm: float, order: int
) -> torch.Tensor:
    """Returns the same by one plain backward pass a row, in float64."""
    model, total = copy.deepcopy(model).double(), torch.zeros(())
    parameters = [p for p in model.parameters() if p.requires_grad]
    for row, label in zip(inputs.double(), labels, strict=True):
        loss = cross_entropy(model(row[None]), label[None])
        grads = torch.autograd.grad(loss, parameters)
        grad_P = torch.cat([g.flatten() for g in grads])
        total = total + grad_P * min(1.0, clipping_norm / float(grad_P.norm(order)))
    return total


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", [*FAST, *OPACUS])
def test_clipped_sums_equal_one_backward_pass_a_row(name: str, order: int) -> None:
    model = network((FAST | OPACUS)[name])
    for clipping_norm in (1e-2, 1e6):
        got = clipped_sum(model, *data(), clipping_norm, order)
        expected = one_by_one(model, *data(), clipping_norm, order)
        assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", FAST)
def test_layers_with_a_rule_get_no_hook_and_no_plain_gradient(name: str) -> None:
    model = network(FAST[name])
    inputs, labels = data()
    with per_sample_gradients(model) as wrapped:
        assert not wrapped.autograd_grad_sample_hooks
        cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
        assert all(p.grad is None for p in model.parameters())
        assert all(p.grad_sample is not None for p in model.parameters())  # type: ignore[attr-defined]
    for module in model.modules():
        assert "forward" not in vars(module)
    assert all(not vars(p) for p in model.parameters())


@pytest.mark.parametrize("name", OPACUS)
def test_other_layers_keep_opacus_hooks(name: str) -> None:
    with per_sample_gradients(network(OPACUS[name])) as wrapped:
        assert wrapped.autograd_grad_sample_hooks


def test_many_rows_are_unfolded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = network(FAST["conv, groups"]), data(11)
    whole = clipped_sum(model, *batch, 0.1, 2)
    monkeypatch.setattr("fl_app.training._fast_gradients._CACHED", 700)
    torch.testing.assert_close(clipped_sum(model, *batch, 0.1, 2), whole, rtol=1e-6, atol=1e-8)


# --- the bound


def shares(grads: SampleGradients, clipping_norm: float, order: int) -> np.ndarray:
    """Returns the norm [B] of each row's share of the clipped sum, in float64."""
    factors_B = (clipping_norm / grads.norms(order)).clamp(max=1.0)
    rows = torch.eye(len(grads), dtype=factors_B.dtype) * factors_B
    sums = [grads.weighted_sum(row).double().flatten() for row in rows]
    return np.array([float(s.norm(order)) for s in sums])


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 1e20, 1e37])
@pytest.mark.parametrize("clipping_norm", [1e-3, 1.0])
def test_factors_of_any_size_stay_within_c(order: int, scale: float, clipping_norm: float) -> None:
    """A tiny factor times a huge one: scaled one after the other, digits would be lost."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(20, 50, generator=generator) * scale
    inputs = torch.randn(20, 3000, generator=generator) / scale
    norms = shares(Outer(outputs_BO=outputs, inputs_BI=inputs), clipping_norm, order)
    assert (norms <= clipping_norm * (1 + 1e-6)).all()
    assert (norms >= clipping_norm * (1 - 1e-6)).all()


@pytest.mark.parametrize("order", [1, 2])
def test_norms_of_a_million_numbers_are_exact(order: int) -> None:
    """Equal numbers: a float32 sum of their magnitudes or squares comes out too small or large."""
    outputs, inputs = torch.full((2, 1024), 0.37), torch.full((2, 1024), 0.11)
    expected = float(np.float32(0.37)) * float(np.float32(0.11)) * 1024 ** (2 / order)
    dense = (outputs[:, :, None] * inputs[:, None, :]).double().flatten(1)
    for grads in (Outer(outputs_BO=outputs, inputs_BI=inputs), Dense(dense.float())):
        np.testing.assert_allclose(grads.norms(order).numpy(), expected, rtol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["linear", "linear over positions", "conv, groups", "pooled"])
def test_a_row_that_is_not_finite_counts_as_zero(name: str, bad: float) -> None:
    model = network(FAST[name])
    inputs, labels = data()
    rest = torch.tensor([0, 1, 3, 4])
    expected = clipped_sum(model, inputs[rest], labels[rest], 0.1, 2)
    inputs[2] = bad
    broken = clipped_sum(model, inputs, labels, 0.1, 2)
    assert torch.isfinite(broken).all()
    torch.testing.assert_close(broken, expected, rtol=1e-5, atol=1e-7)


def test_rows_whose_factor_would_lose_its_digits_count_as_zero() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    step = optimizer(nn.ParameterList([parameter]), 1e-3, NoiseKind.GAUSSIAN)
    step.num_rows = 2
    parameter.grad_sample = torch.tensor([[3e37, 0, 0], [0, 1.0, 0]])  # type: ignore[attr-defined]
    step.clip_and_accumulate()
    np.testing.assert_allclose(parameter.summed_grad, [0, 1e-3, 0], rtol=1e-5)  # type: ignore[attr-defined]


# --- what is refused


def test_a_second_batch_before_zero_grad_is_refused() -> None:
    model = network(FAST["linear"])
    with per_sample_gradients(model) as wrapped:
        wrapped(data()[0]).sum().backward()
        with pytest.raises(ValueError, match="zero_grad"):
            wrapped(data()[0])


def test_gradients_that_are_not_one_a_record_are_refused() -> None:
    model = nn.Sequential(nn.Flatten(0, 1), nn.Flatten(), nn.Linear(63, 3))
    with per_sample_gradients(model) as wrapped:
        wrapped(data()[0]).sum().backward()
        with pytest.raises(ModelError, match="one a record"):
            sample_gradients(model[2].weight, ROWS)


class MixesRows(nn.Module):
    """Per-sample gradients by layer add up to its gradient, but are not those of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        scores: torch.Tensor = self.second(hidden + hidden.mean(0))
        return scores


def test_a_network_that_mixes_rows_is_refused_even_if_its_gradients_add_up() -> None:
    with pytest.raises(ModelError, match="do not add up"):
        check_per_sample(MixesRows(), InputSpec(shape=(6,), num_classes=3))


def test_dropout_of_images_passes_the_check() -> None:
    network = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(3)
    )
    network(data()[0])
    check_per_sample(network, InputSpec(shape=IMAGE, num_classes=3))


# --- pooling


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 1, 5, 7), (1, 2, 2, 3)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pooling_equals_torchs_in_values_and_gradients_ties_too(
    shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(3, shape, generator=generator).float()  # many are equal
    values = values.contiguous(memory_format=memory_format)
    results = []
    for pool in (_MaxPool2x2.apply, lambda x: max_pool2d(x, 2)):
        x = values.clone(memory_format=torch.preserve_format).requires_grad_()
        y = pool(x)
        weights = torch.arange(1.0, y.numel() + 1).view(y.shape)
        (grad,) = torch.autograd.grad((y * weights).sum(), x)
        results.append((y.detach(), grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
