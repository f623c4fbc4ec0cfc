"""The benchmark networks: golden sizes, one by one gradients, exchange by name, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import models, plugins
from fl_app.errors import ModelError, SettingsError
from fl_app.models._layers import group_norm_like
from fl_app.stages import InputSpec
from fl_app.training._fast_gradients import sample_gradients
from fl_app.training._opacus import check_per_sample, per_sample_gradients

REPO = Path(__file__).resolve().parents[2]
MNIST = InputSpec(shape=(1, 28, 28), num_classes=10)
CIFAR = InputSpec(shape=(3, 32, 32), num_classes=10)
FEMNIST = InputSpec(shape=(1, 28, 28), num_classes=62)
LARGE = InputSpec(shape=(3, 64, 64), num_classes=10)
IMAGENET = InputSpec(shape=(3, 64, 64), num_classes=1000)
TEXT = InputSpec(shape=(80,), num_classes=90, vocabulary=90)
SHORT = InputSpec(shape=(6,), num_classes=7, vocabulary=7)


def shipped(kind: str, **changes: Any) -> plugins.Model:
    text = (REPO / "conf" / "model" / f"{kind}.yaml").read_text(encoding="utf-8")
    model: plugins.Model = plugins.build("model", yaml.safe_load(text) | changes)
    return model


def build(kind: str, spec: InputSpec, *, private: bool = True, **changes: Any) -> nn.Module:
    return models.build_model(shipped(kind, **changes), spec, seed=0, private=private)


def inputs_of(spec: InputSpec, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if spec.vocabulary is not None:
        return torch.randint(spec.vocabulary, (num_rows, *spec.shape), generator=generator)
    return torch.randn(num_rows, *spec.shape, generator=generator)


GOLDEN = [
    # 4 (9 + 1) of the convolution, 10 (4 x 14 x 14 + 1) of the linear layer.
    ("tiny_mobilenet", MNIST, {}, 7_890),
    # Papernot et al. 2020, arXiv:2007.14191: 550,570 without normalization; 2 x 448 of GroupNorm.
    ("cnn_cifar", CIFAR, {}, 550_570 + 896),
    # Reddi et al. 2020, arXiv:2003.00295: 1,206,590.
    ("cnn_femnist", FEMNIST, {}, 1_206_590),
    # The same: 820,522 with one bias a gate; torch has a second one in each of two layers.
    ("char_lstm", TEXT, {}, 820_522 + 2 * 4 * 256),
    # torchvision's documented size for 1,000 labels; BatchNorm and GroupNorm have the same size.
    ("resnet18_gn", IMAGENET, {"stem": "large"}, 11_689_512),
    # The usual CIFAR variant: a 3 x 3 stem in place of the 7 x 7 one (3 x 64 x 40 fewer weights).
    ("resnet18_gn", CIFAR, {}, 11_689_512 - 513_000 + 5_130 - 7_680),
    # torchvision's documented sizes.
    ("torchvision", IMAGENET, {"name": "resnet18"}, 11_689_512),
    ("torchvision", IMAGENET, {"name": "squeezenet1_1"}, 1_235_496),
    ("torchvision", IMAGENET, {"name": "mobilenet_v2"}, 3_504_872),
]


@pytest.mark.parametrize(("kind", "spec", "changes", "count"), GOLDEN)
def test_parameter_counts_are_those_of_the_literature(
    kind: str, spec: InputSpec, changes: dict[str, Any], count: int
) -> None:
    assert models.num_parameters(build(kind, spec, **changes)) == count


SMALL = [
    ("tiny_mobilenet", MNIST, {}),
    ("tiny_mobilenet", CIFAR, {"activation": "tanh"}),
    ("cnn_cifar", CIFAR, {"channels": [8, 16], "hidden": 8}),
    ("cnn_femnist", FEMNIST, {}),
    ("char_lstm", SHORT, {"hidden": 16}),
    ("resnet18_gn", MNIST, {}),
    ("torchvision", LARGE, {"name": "resnet18"}),
    ("torchvision", LARGE, {"name": "mobilenet_v3_small"}),
    ("torchvision", MNIST, {"name": "shufflenet_v2_x0_5"}),
]


def one_by_one(network: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = []
    for i in range(len(inputs)):
        network.zero_grad()
        cross_entropy(network(inputs[i : i + 1]), labels[i : i + 1]).backward()
        grads = [p.grad if p.grad is not None else torch.zeros(()) for p in network.parameters()]
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    network.zero_grad()
    return torch.stack(rows)


@pytest.mark.parametrize(("kind", "spec", "changes"), SMALL)
def test_per_sample_gradients_equal_one_by_one_gradients(
    kind: str, spec: InputSpec, changes: dict[str, Any]
) -> None:
    network = build(kind, spec, **changes)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # it would draw other units one by one
    inputs, labels = inputs_of(spec, 3), torch.tensor([1, 5, 3])
    expected = one_by_one(network, inputs, labels)
    with per_sample_gradients(network) as wrapped:
        cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
        grads = [sample_gradients(p, 3) for p in network.parameters()]
    rows = torch.eye(3, dtype=torch.float64)
    got = torch.stack([torch.cat([g.weighted_sum(r).flatten() for g in grads]) for r in rows])
    assert (got - expected).norm() <= 1e-5 * expected.norm() + 1e-6


@pytest.mark.parametrize(("kind", "spec", "changes"), SMALL)
def test_networks_pass_the_check_and_have_plain_state_either_way(
    kind: str, spec: InputSpec, changes: dict[str, Any]
) -> None:
    private = build(kind, spec, **changes)
    check_per_sample(private, spec)
    plain = shipped(kind, **changes).build(spec)
    assert list(private.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(private.state_dict(), strict=True)
    private.load_state_dict(plain.state_dict(), strict=True)
    np.testing.assert_array_equal(models.flat_parameters(private), models.flat_parameters(plain))
    plain.eval(), private.eval()
    inputs = inputs_of(spec, 2)
    torch.testing.assert_close(plain(inputs), private(inputs), rtol=1e-4, atol=1e-5)


# --- the recurrent network


def test_the_private_lstm_starts_as_the_plain_one_and_differs_only_in_its_class() -> None:
    plain, private = (build("char_lstm", SHORT, hidden=16, private=p) for p in (False, True))
    assert type(plain.lstm) is nn.LSTM
    assert type(private.lstm).__name__ == "DPLSTM"
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in private.named_parameters()]
    assert names[1:5] == [f"lstm.{n}_l0" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    np.testing.assert_array_equal(models.flat_parameters(plain), models.flat_parameters(private))


def test_a_flat_vector_lands_on_the_same_names_in_both_lstms() -> None:
    plain, private = (build("char_lstm", SHORT, hidden=16, private=p) for p in (False, True))
    vector_P = np.arange(models.num_parameters(plain), dtype=np.float32)
    for network in (plain, private):
        models.set_flat_parameters(network, vector_P)
    state = private.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    # The cells of Opacus' layer compute with the very same tensors.
    assert private.lstm.l0.hh.weight is private.lstm.weight_hh_l0  # type: ignore[union-attr]


def test_a_state_without_or_beyond_a_name_is_refused() -> None:
    network = build("char_lstm", SHORT, hidden=16)
    state = dict(network.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected"):
        network.load_state_dict({**state, "lstm.other": torch.zeros(1)}, strict=True)
    del state["lstm.bias_hh_l1"]
    with pytest.raises(RuntimeError, match="Missing"):
        network.load_state_dict(state, strict=True)


LOAD_WITHOUT_OPACUS = """
import sys
sys.modules["opacus"] = None
from safetensors.torch import load_file
from fl_app import plugins
from fl_app.stages import InputSpec
values = {"kind": "char_lstm", "embedding": 8, "hidden": 16, "num_layers": 2}
model = plugins.build("model", values).build(
    InputSpec(shape=(6,), num_classes=7, vocabulary=7))
print(model.load_state_dict(load_file(sys.argv[1]), strict=True))
"""


def test_a_saved_lstm_loads_strictly_without_the_dp_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(build("char_lstm", SHORT, hidden=16).state_dict(), path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_OPACUS, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "All keys matched" in done.stdout, done.stderr


def test_the_scores_of_the_lstm_depend_on_every_token_and_on_their_order() -> None:
    network = build("char_lstm", SHORT, hidden=16)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]])
    scores = network(tokens)
    assert scores.shape == (3, 7)
    assert not torch.allclose(scores[0], scores[1], atol=1e-6)
    assert not torch.allclose(scores[0], scores[2], atol=1e-6)


# --- normalization


@pytest.mark.parametrize(
    ("channels", "groups"), [(4, 1), (8, 1), (16, 2), (24, 3), (64, 8), (256, 32), (512, 32)]
)
def test_groups_keep_at_least_eight_channels(channels: int, groups: int) -> None:
    assert group_norm_like(nn.BatchNorm2d(channels)).num_groups == groups


def test_batch_norm_over_four_features_stays_alive_in_a_batch_of_one() -> None:
    network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    ready = models.prepare(network, private=True)
    ready.train()
    scores = ready(inputs_of(InputSpec(shape=(6,), num_classes=3), 5))
    assert ready(torch.ones(1, 6)).shape == (1, 3)
    # With as many groups as features every value would be zero, and all rows alike.
    assert (scores - scores[:1]).abs().max() > 1e-2


def test_batch_norm_over_one_feature_is_refused_by_name() -> None:
    network = nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1))
    with pytest.raises(ModelError, match=r"model: 1: BatchNorm1d over 1 feature.*remove it"):
        models.prepare(network, private=True)


@pytest.mark.parametrize("private", [True, False])
def test_torchvision_networks_have_no_batch_statistics(private: bool) -> None:
    network = build("torchvision", LARGE, name="resnet18", private=private)
    assert not list(network.buffers())


# --- what cannot be


class AddsInPlace(nn.Module):
    """Its two forms differ only in whether the result of the addition is used by name."""

    def __init__(self, *, rebinds: bool) -> None:
        super().__init__()
        self.rebinds = rebinds
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(torch.tanh(self.first(x))))
        if self.rebinds:
            hidden += torch.ones_like(hidden)
        else:
            hidden.add_(torch.ones_like(hidden))
        scores: torch.Tensor = self.second(hidden)
        return scores


TABLE = InputSpec(shape=(6,), num_classes=3)


def test_a_residual_addition_trains_and_an_anonymous_one_is_refused() -> None:
    check_per_sample(AddsInPlace(rebinds=True), TABLE)
    with pytest.raises(ModelError, match=r"write x = x \+ y"):
        check_per_sample(AddsInPlace(rebinds=False), TABLE)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner((x * self.scale).reshape(2, 6))
        return scores


def test_a_network_that_needs_two_rows_is_refused_naming_the_layer() -> None:
    network = nn.Sequential()
    network.add_module("bad", Mixes())
    with pytest.raises(ModelError, match=r"bad \(Mixes\).*training=sgd"):
        check_per_sample(network, TABLE)


def test_the_check_leaves_no_trace() -> None:
    network = build("torchvision", LARGE, name="squeezenet1_1")
    network.eval()
    before_P, generator = models.flat_parameters(network), torch.get_rng_state()
    attributes = {name: set(vars(m)) for name, m in network.named_modules()}
    check_per_sample(network, LARGE)
    np.testing.assert_array_equal(models.flat_parameters(network), before_P)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not network.training
    assert {name: set(vars(m)) for name, m in network.named_modules()} == attributes
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(not vars(p) and p.grad is None for p in network.parameters())


@pytest.mark.parametrize(
    ("kind", "spec", "changes", "text"),
    [
        ("linear", TEXT, {}, "choose model=char_lstm"),
        ("char_lstm", MNIST, {}, "choose a text dataset"),
        ("cnn_cifar", TABLE, {}, "choose model=mlp"),
        ("cnn_femnist", TABLE, {}, "choose model=mlp"),
        ("tiny_mobilenet", TABLE, {}, "choose model=mlp"),
        ("resnet18_gn", TABLE, {}, "choose model=mlp"),
        ("torchvision", LARGE, {"name": "vit_b_16"}, r"set dataset\.image_size"),
        ("torchvision", LARGE, {"name": "swin_t"}, r"attn \(ShiftedWindowAttention\)"),
    ],
)
def test_networks_and_inputs_that_do_not_fit_are_refused_with_the_way_out(
    kind: str, spec: InputSpec, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        build(kind, spec, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("torchvision", {"name": "resnet81"}, "did you mean resnet"),
        ("cnn_cifar", {"num_groups": 5}, r"model\.num_groups=5: must divide model\.channels\[0\]"),
        ("cnn_cifar", {"channels": []}, r"model\.channels="),
        ("resnet18_gn", {"num_groups": 3}, r"model\.num_groups=3: must divide 64"),
        ("resnet18_gn", {"stem": "smal"}, "did you mean small"),
        ("char_lstm", {"hidden": 0}, r"model\.hidden=0"),
        ("cnn_femnist", {"hidden_dropout": 1.0}, r"model\.hidden_dropout=1\.0"),
        ("tiny_mobilenet", {"activation": "gelu"}, r"model\.activation=gelu"),
    ],
)
def test_impossible_values_are_refused_by_key(
    kind: str, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        shipped(kind, **changes)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.output = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :]
        scores: torch.Tensor = self.output(self.attention(x, x, x)[0][:, 0])
        return scores


def test_attention_keeps_its_names_and_is_refused_at_record_level_only() -> None:
    network = Attends()
    names = list(network.state_dict())
    ready = models.prepare(network, private=True)
    assert list(ready.state_dict()) == names
    with pytest.raises(ModelError, match=r"attention.*choose training=sgd"):
        check_per_sample(ready, TABLE)
