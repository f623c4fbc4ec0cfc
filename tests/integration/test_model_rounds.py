"""One round of every model, record level and plain, on a few real rows in the local engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import CENTRAL, UNLIMITED, watched_run
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from fl_app import plugins
from fl_app.data.digits import PLUGIN as DIGITS
from fl_app.overrides import compose
from fl_app.stages import InputSpec, LoadedData, Table

REPO = Path(__file__).resolve().parents[2]
GREY, COLOUR, TEXT = (1, 32, 32), (3, 32, 32), (20,)


class Scaled(plugins.Transform):
    def __call__(self, stored: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(stored, np.float32)) / 16


class Tokens(plugins.Transform):
    def __call__(self, stored: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(stored, np.int64))


def real_rows(shape: tuple[int, ...]) -> LoadedData:
    """24 training and 12 test rows: handwritten digits enlarged, or this project's licence."""
    if shape == TEXT:
        text = np.frombuffer((REPO / "LICENSE").read_bytes(), np.uint8).astype(np.int64) % 90
        windows = np.stack([text[i * 21 : i * 21 + 21] for i in range(36)])
        rows, labels, transform, vocabulary = windows[:, :20], windows[:, 20], Tokens(), 90
        spec = InputSpec(shape=shape, num_classes=90, vocabulary=vocabulary)
    else:
        images, labels = load_digits(return_X_y=True)
        rows = np.kron(images[:36].reshape(-1, 1, 8, 8), np.ones((1, shape[0], 4, 4)))
        labels, transform = labels[:36].astype(np.int64), Scaled()
        spec = InputSpec(shape=shape, num_classes=10)
    train, test = (
        Table(features=rows[part], labels=labels[part], transform=transform)
        for part in (slice(24), slice(24, 36))
    )
    return LoadedData(train=train, test=test, spec=spec)


MODELS = [
    ("linear", GREY, []),
    ("mlp", GREY, []),
    ("cnn", GREY, []),
    ("tiny_mobilenet", GREY, []),
    ("cnn_femnist", GREY, ["model.hidden_dropout=0.5"]),
    ("cnn_cifar", COLOUR, []),
    ("resnet18_gn", COLOUR, []),
    ("torchvision", COLOUR, ["model.name=shufflenet_v2_x0_5"]),
    ("char_lstm", TEXT, []),
]
WAYS = {
    "record": ["training=dp_sgd", "training.noise_multiplier=1", "training.local_steps=1"],
    "client": [*CENTRAL, "training=sgd", "mechanism.noise_multiplier=1"],
    "plain": ["training=sgd", "mechanism=none"],
}


SLOW = ("resnet18_gn", "torchvision")  # their client-level round is the plain one plus noise
CASES = [(*m, way) for m in MODELS for way in WAYS if not (m[0] in SLOW and way == "client")]


@pytest.mark.parametrize(
    ("kind", "shape", "overrides", "way"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES]
)
def test_a_real_round_moves_the_model_and_leaves_plain_state(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    shape: tuple[int, ...],
    overrides: list[str],
    way: str,
) -> None:
    data = real_rows(shape)
    monkeypatch.setattr(DIGITS, "load", lambda self, **_: data)
    values: list[str] = [f"model={kind}", "partition=iid", "federation.population=2", *UNLIMITED]
    values += [*overrides, *WAYS[way], "run.num_rounds=1", "run.device=cpu"]
    run = watched_run(tmp_path / "run", *values)
    assert run.report.status == "completed"
    replies = run.grid.train_replies()
    assert len(replies) == 2
    for reply in replies:
        vector = reply.content.array_records["update"]["vector"].numpy()
        assert np.isfinite(vector).all()
        assert vector.any()
    saved: dict[str, Any] = load_file(tmp_path / "run" / "model.safetensors")
    settings = compose([f"model={kind}", *overrides])
    settings.model.build(data.spec).load_state_dict(saved, strict=True)
