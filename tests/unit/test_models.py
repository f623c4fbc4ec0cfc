"""Models: sizes, initialization, flat parameters, preparation for private training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from torch import nn

from fl_app import models, plugins
from fl_app.errors import ModelError, SettingsError
from fl_app.stages import InputSpec

DIGITS = InputSpec(shape=(1, 8, 8), num_classes=10)
MNIST = InputSpec(shape=(1, 28, 28), num_classes=10)
CIFAR = InputSpec(shape=(3, 32, 32), num_classes=10)

LINEAR = {"kind": "linear"}
MLP = {"kind": "mlp", "hidden": [64], "activation": "tanh"}
CNN = {"kind": "cnn", "activation": "relu", "dropout": 0.0}


def build(
    values: dict[str, object], spec: InputSpec, *, seed: int = 0, private: bool = True
) -> nn.Module:
    return models.build_model(plugins.build("model", values), spec, seed=seed, private=private)


class Custom(plugins.Model):
    """A model whose network is given; not a file plug-in, so it has no yaml."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def build(self, spec: InputSpec) -> nn.Module:
        return self.network


# Counts by hand: weights plus biases of each layer.
@pytest.mark.parametrize(
    ("values", "spec", "count"),
    [
        (LINEAR, DIGITS, 64 * 10 + 10),
        (LINEAR, MNIST, 7_850),
        (MLP, DIGITS, 64 * 64 + 64 + 650),
        (MLP | {"hidden": [32, 16]}, DIGITS, (64 * 32 + 32) + (32 * 16 + 16) + (16 * 10 + 10)),
        (CNN, MNIST, 21_840),
        (CNN, CIFAR, (3 * 250 + 10) + (10 * 500 + 20) + (500 * 50 + 50) + 510),
    ],
)
def test_parameter_count(values: dict[str, object], spec: InputSpec, count: int) -> None:
    assert models.num_parameters(build(values, spec)) == count


@pytest.mark.parametrize(("values", "spec"), [(LINEAR, DIGITS), (MLP, DIGITS), (CNN, MNIST)])
def test_scores_have_one_row_per_input_even_for_an_empty_batch(
    values: dict[str, object], spec: InputSpec
) -> None:
    network = build(values, spec)
    for batch in (0, 1, 3):
        assert network(torch.zeros(batch, *spec.shape)).shape == (batch, 10)


@pytest.mark.parametrize(("values", "spec"), [(LINEAR, DIGITS), (MLP, DIGITS), (CNN, MNIST)])
def test_per_sample_gradients_of_opacus_equal_one_by_one_gradients(
    values: dict[str, object], spec: InputSpec
) -> None:
    network = build(values, spec)
    inputs = torch.rand(3, *spec.shape, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 5, 9])
    loss = nn.CrossEntropyLoss()
    expected = []
    for i in range(3):
        network.zero_grad()
        loss(network(inputs[i : i + 1]), labels[i : i + 1]).backward()
        expected.append(torch.cat([p.grad.reshape(-1) for p in network.parameters()]))
    network.zero_grad()
    wrapped = GradSampleModule(network)
    loss(wrapped(inputs), labels).backward()
    got = torch.cat([p.grad_sample.reshape(3, -1) for p in network.parameters()], dim=1)
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_initialization_follows_the_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first = models.flat_parameters(build(MLP, DIGITS, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = models.flat_parameters(build(MLP, DIGITS, seed=1))
    other = models.flat_parameters(build(MLP, DIGITS, seed=2))
    torch.set_rng_state(before)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_flat_parameters_are_a_copy_in_the_order_of_named_parameters() -> None:
    network = build(MLP, DIGITS)
    vector = models.flat_parameters(network)
    expected = np.concatenate([p.detach().numpy().ravel() for _, p in network.named_parameters()])
    np.testing.assert_array_equal(vector, expected)
    assert vector.dtype == np.float32
    vector[:] = 0
    np.testing.assert_array_equal(models.flat_parameters(network), expected)


def test_set_flat_parameters_writes_in_place_and_keeps_no_view() -> None:
    network = build(CNN, MNIST)
    parameters = list(network.parameters())
    vector = np.arange(21_840, dtype=np.float32)
    models.set_flat_parameters(network, vector)
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))
    with torch.no_grad():
        parameters[0].zero_()
    np.testing.assert_array_equal(vector, np.arange(21_840))
    np.testing.assert_array_equal(models.flat_parameters(network)[250:], vector[250:])


def test_set_flat_parameters_rounds_double_precision_once() -> None:
    network = build(CNN, MNIST)
    vector = np.random.default_rng(0).standard_normal(21_840)
    models.set_flat_parameters(network, vector)
    np.testing.assert_array_equal(models.flat_parameters(network), vector.astype(np.float32))


@pytest.mark.parametrize("size", [649, 651])
def test_set_flat_parameters_refuses_another_size(size: int) -> None:
    with pytest.raises(ModelError, match=r"\(650,\)"):
        models.set_flat_parameters(build(LINEAR, DIGITS), np.zeros(size, dtype=np.float32))


def test_only_trainable_float_parameters_are_exchanged() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    network[0].weight.requires_grad_(False)
    assert models.num_parameters(network) == 3 + 6 + 8
    vector = models.flat_parameters(network)
    models.set_flat_parameters(network, vector + 1)
    np.testing.assert_array_equal(models.flat_parameters(network), vector + 1)
    assert int(network[1].num_batches_tracked) == 0


def test_private_networks_get_group_norm_for_batch_norm_at_every_depth() -> None:
    inner = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    network = build_custom(nn.Sequential(inner, nn.Flatten(), nn.Linear(8 * 36, 10)))
    kinds = [type(module) for module in network.modules()]
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    assert not any(getattr(module, "inplace", False) for module in network.modules())


def test_group_norm_networks_do_not_mix_records() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10))
    network = build_custom(nn.Sequential(*layers))
    inputs = torch.rand(2, 1, 8, 8)
    alone = network(inputs[:1])
    torch.testing.assert_close(network(inputs)[:1], alone)
    raw = nn.Sequential(*layers[:1], nn.BatchNorm2d(8), *layers[2:])
    assert not torch.allclose(raw(inputs)[:1], raw(inputs[:1]), atol=1e-3)


def test_networks_that_are_not_private_stay_as_they_are() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))
    assert models.build_model(Custom(network), DIGITS, seed=0, private=False) is network
    assert type(network[1]) is nn.BatchNorm1d


def test_every_layer_that_is_refused_is_named_in_one_error() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(1))

    network = nn.Sequential()
    network.add_module("frozen", nn.BatchNorm1d(3, affine=False))
    network.add_module("tracked", nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
    network.add_module("scaled", Scaled())
    network.add_module("fine", nn.Linear(3, 3))
    with pytest.raises(ModelError) as caught:
        build_custom(network)
    text = str(caught.value)
    assert all(name in text for name in ("frozen", "tracked", "scaled", "3 layer(s)"))
    assert "fine" not in text
    assert "nn.GroupNorm" in text
    assert "track_running_stats=False" in text


def test_a_network_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        build_custom(nn.Flatten())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_where_clipping_and_noise_need_more(dtype: torch.dtype) -> None:
    """Opacus' sums have the parameters' type: clipped in 11 bits, and noise does not fit."""
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).to(dtype))
    with pytest.raises(ModelError, match=rf"parameter 1\.weight is {dtype}.*torch\.float32"):
        build_custom(network)
    assert models.build_model(Custom(network), DIGITS, seed=0, private=False) is network
    for parameter in network[1].parameters():
        parameter.requires_grad_(False)  # never exchanged, nor noised
    assert models.num_parameters(build_custom(network)) == 15
    assert models.num_parameters(build_custom(nn.Linear(4, 3).double())) == 15


@pytest.mark.parametrize("shape", [(64,), (1, 8, 8), (1, 15, 28)])
def test_cnn_refuses_inputs_that_are_too_small_and_names_the_way_out(shape: tuple[int]) -> None:
    with pytest.raises(ModelError, match="choose model=mlp or model=linear"):
        build(CNN, InputSpec(shape=shape, num_classes=10))


def test_cnn_takes_the_smallest_images_it_says() -> None:
    network = build(CNN, InputSpec(shape=(1, 16, 17), num_classes=3))
    assert network(torch.zeros(2, 1, 16, 17)).shape == (2, 3)


def test_dropout_acts_in_training_only() -> None:
    network = build(CNN | {"dropout": 0.5}, MNIST)
    inputs = torch.rand(4, 1, 28, 28)
    assert not torch.equal(network(inputs), network(inputs))
    network.eval()
    assert torch.equal(network(inputs), network(inputs))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (MLP | {"hidden": []}, "model.hidden="),
        (MLP | {"hidden": [8, 0]}, r"model.hidden\[1\]=0"),
        (MLP | {"activation": "rlu"}, "did you mean relu"),
        (CNN | {"dropout": 1.0}, "model.dropout=1.0"),
        (CNN | {"dropout": -0.1}, "model.dropout=-0.1"),
        (CNN | {"activation": "gelu"}, "model.activation=gelu"),
    ],
)
def test_impossible_values_are_refused_by_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        plugins.build("model", values)


def build_custom(network: nn.Module) -> nn.Module:
    return models.build_model(Custom(network), DIGITS, seed=0, private=True)
