"""Shakespeare: 80 characters of a speaking role, and the character that comes next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_app.data import hub
from fl_app.data.holdout import SPLIT_SEED, write_splits
from fl_app.data.source import Source, find_source
from fl_app.data.text import CHARACTERS, NUM_TOKENS, WINDOW, Tokens, encode
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData

_COLUMNS = ("character_id", "x", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shakespeare(Dataset):
    """Windows of 80 tokens with the next one as label (Caldas et al. 2018, arXiv:1812.01097).

    Inputs are int64 tokens [80] of a fixed public vocabulary of 80 characters, and token 80 for
    every other one; accuracy is that of the next character. The hub's copy has a train split only,
    so three uses are cut from it with a public constant seed, the same in every run, whatever
    ``run.seed``:

    - ``test``: all windows of one speaking role in ten. The server's public test set: roles whom
      no client is.
    - ``validation``: the last tenth of the windows of every other role, as neighbours overlap.
      Read only by a run with ``run.evaluate_on=validation``, for choices made before one.
    - ``train``: the windows before them. With ``partition=natural`` each role is a client.

    Attributes:
        hub_id: owner/name on the hub, also the sub-folder of ``$DPFL_DATA_ROOT``.
        path: folder with the dataset's files, or None.
    """

    hub_id: str | None
    path: str | None

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the dataset from the first of `data_path`, `path`, the data root and the hub.

        Raises:
            DataError: not there or not readable; without a network, within 10 seconds.
        """
        source = find_source(data_path, self.path, self.hub_id)
        decoded = hub.load_decoded(
            source,
            cache_dir,
            "shakespeare",
            ("shakespeare", CHARACTERS, WINDOW, SPLIT_SEED),
            lambda folder: _decode(source, folder),
        )
        return decoded.loaded(Tokens(), vocabulary=NUM_TOKENS)


def _decode(source: Source, folder: Path) -> int:
    found_as = source.found_as
    with hub.readable(found_as, "Shakespeare", "complete Parquet files of flwrlabs/shakespeare"):
        opened = hub.open_splits(
            source.location, None, {"train": "train"}, found_as, folder / "arrow"
        )
        table = opened["train"]
        for column in _COLUMNS:
            hub.check_columns(table, {"path": column})
        features = encode(table["x"], WINDOW, f"{found_as}: column x")
        labels = encode(table["y"], 1, f"{found_as}: column y")[:, 0].astype(np.int64)
        roles = np.asarray(table["character_id"], dtype=np.str_)
    write_splits(folder, features, labels, roles, ordered=True)
    return NUM_TOKENS


PLUGIN = Shakespeare
