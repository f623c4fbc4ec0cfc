"""FEMNIST and Shakespeare: which rows are for what, tokens, refusals, and the real copies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from fl_app import plugins
from fl_app.data.holdout import hold_out
from fl_app.data.text import CHARACTERS, NUM_TOKENS, Tokens, encode
from fl_app.errors import DataError
from fl_app.overrides import compose_mapping
from fl_app.partitioners import client_rows

NATURAL: plugins.Partitioner = plugins.build("partition", {"kind": "natural"})


def configured(name: str, **changes: Any) -> plugins.Dataset:
    section = compose_mapping([f"dataset={name}"])["dataset"]
    dataset: plugins.Dataset = plugins.build("dataset", section | changes)
    return dataset


def source_table(hub_id: str, columns: list[str]) -> dict[str, list[Any]]:
    folder = Path(os.environ["DPFL_DATA_ROOT"]) / hub_id
    if not folder.is_dir():
        pytest.skip(f"no copy of {hub_id} in $DPFL_DATA_ROOT")
    table = pq.read_table(folder / "train-00000-of-00001.parquet", columns=columns)
    return {name: table[name].to_pylist() for name in columns}


def test_every_row_has_one_use_and_no_writer_both_trains_and_tests() -> None:
    names = np.repeat([f"w{i}" for i in range(25)], np.arange(5, 30))
    rows = hold_out(names, ordered=False)
    assert sorted(np.concatenate(list(rows.values())).tolist()) == list(range(len(names)))
    tested, trained = set(names[rows["test"]]), set(names[rows["train"]])
    assert len(tested) == 2
    assert trained | tested == set(names)
    assert not trained & tested
    for name in trained:
        total = int((names == name).sum())
        assert int((names[rows["validation"]] == name).sum()) == total // 10


def test_the_uses_are_the_same_in_every_run_and_for_every_order_of_reading() -> None:
    names = np.repeat(["a", "b", "c"], 10)
    first, second = hold_out(names, ordered=False), hold_out(names, ordered=False)
    assert all(np.array_equal(first[s], second[s]) for s in first)
    backwards = hold_out(names[::-1], ordered=False)
    assert set(names[::-1][backwards["test"]]) == set(names[first["test"]])


def test_validation_rows_of_ordered_groups_are_their_last_ones() -> None:
    names = np.repeat(["a", "b"], 20)
    rows = hold_out(names, ordered=True)
    start = 0 if names[rows["train"][0]] == "a" else 20
    assert rows["validation"].tolist() == [start + 18, start + 19]


def test_one_group_only_is_refused() -> None:
    with pytest.raises(DataError, match="at least 2 groups"):
        hold_out(np.array(["a", "a"]), ordered=False)


def test_every_character_of_the_vocabulary_has_its_own_token_and_all_others_share_the_last() -> (
    None
):
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    assert encode([CHARACTERS], 80, "here")[0].tolist() == list(range(80))
    assert encode(["_éΩ\U0001f600\xff"], 5, "here")[0].tolist() == [NUM_TOKENS - 1] * 5


def test_texts_of_another_length_are_refused_without_their_content() -> None:
    with pytest.raises(DataError, match=r"here: every text must have 5 character") as caught:
        encode(["abcde", "secret"], 5, "here")
    assert "secret" not in str(caught.value)


def test_tokens_become_int64() -> None:
    stored = np.array([[0, 80]], dtype=np.uint8)
    assert Tokens()(stored).tolist() == [[0, 80]]
    assert Tokens()(stored).dtype == torch.int64
    assert Tokens()(stored[:0]).shape == (0, 2)


def test_femnist_has_its_facts_and_one_natural_client_per_training_writer(cache_dir: Path) -> None:
    source = source_table("flwrlabs/femnist", ["writer_id", "character"])
    data = configured("femnist").load(data_path=None, cache_dir=cache_dir)
    assert (data.spec.shape, data.spec.num_classes) == ((1, 28, 28), 62)
    assert data.validation is not None
    assert data.train.groups is not None
    tables = (data.train, data.validation, data.test)
    labels = np.concatenate([t.labels for t in tables])
    assert np.bincount(labels).tolist() == np.bincount(source["character"]).tolist()
    writers = len(set(source["writer_id"]))
    trained = writers - writers // 10
    assert len(np.unique(data.train.groups)) == trained
    assert abs(len(data.validation.labels) / len(data.train.labels) - 1 / 9) < 0.01
    parts = client_rows(NATURAL, data.train.labels, trained, 0, groups=data.train.groups)
    assert min(len(p) for p in parts) > 0
    inputs = data.train.transform(data.train.features[:2000])
    assert abs(float(inputs.mean())) < 0.1
    assert abs(float(inputs.std()) - 1) < 0.1


def test_shakespeare_rows_are_the_texts_of_the_source(cache_dir: Path) -> None:
    source = source_table("flwrlabs/shakespeare", ["character_id", "x", "y"])
    data = configured("shakespeare").load(data_path=None, cache_dir=cache_dir)
    assert data.spec.shape == (80,)
    assert (data.spec.num_classes, data.spec.vocabulary) == (81, 81)
    assert data.validation is not None
    assert data.train.groups is not None
    assert len(np.unique(data.train.groups)) == 180
    counts = [len(t.labels) for t in (data.train, data.validation, data.test)]
    assert counts == [64_800, 7_200, 8_000]

    def text(row: int) -> str:
        tokens = data.train.transform(data.train.features[row : row + 1])[0].tolist()
        tokens.append(int(data.train.labels[row]))
        return "".join((*CHARACTERS, "_")[t] for t in tokens)

    known = {x + y for x, y in zip(source["x"], source["y"], strict=True)}
    assert all(text(row) in known for row in range(0, 64_800, 997))


@pytest.mark.parametrize(
    ("name", "columns", "match"),
    [
        ("femnist", {"image": [1], "character": [1], "writer_id": ["a"]}, "must hold images"),
        ("femnist", {"picture": [1]}, "no such column; the columns are picture"),
        ("shakespeare", {"x": ["a" * 80], "y": ["b"]}, "character_id: no such column"),
        (
            "shakespeare",
            {"character_id": ["r", "s"], "x": ["a" * 80, "short"], "y": ["b", "c"]},
            "column x: every text must have 80",
        ),
    ],
)
def test_a_folder_with_other_columns_is_refused(
    name: str, columns: dict[str, list[Any]], match: str, tmp_path: Path, cache_dir: Path
) -> None:
    table = datasets.Dataset.from_dict(columns)
    table.to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    with pytest.raises(DataError, match=match):
        configured(name, path=str(tmp_path)).load(data_path=None, cache_dir=cache_dir)


def test_a_truncated_file_is_a_data_error_that_names_the_folder(
    tmp_path: Path, cache_dir: Path
) -> None:
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"dataset\.path=.*cannot be read as FEMNIST"):
        configured("femnist", path=str(tmp_path)).load(data_path=None, cache_dir=cache_dir)
