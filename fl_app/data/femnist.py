"""FEMNIST: handwritten digits and letters, 28 x 28, 62 labels, with the writer of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fl_app.data import hub
from fl_app.data.holdout import SPLIT_SEED, write_splits
from fl_app.data.source import Source, find_source
from fl_app.data.transform import Standardize, check_constants
from fl_app.errors import DataError
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData

NUM_CLASSES = 62
_BATCH_ROWS = 1000
_LARGEST_VALUE = 255.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Femnist(Dataset):
    """Images with one label and one writer each (Caldas et al. 2018, arXiv:1812.01097).

    The hub's copy has a train split only, so three uses are cut from it with a public constant
    seed, the same in every run, whatever ``run.seed``:

    - ``test``: all rows of one writer in ten. The server's public test set: writers whom no client
      is.
    - ``validation``: one row in ten, at random, of every other writer. Read only by a run with
      ``run.evaluate_on=validation``, for choices made before one.
    - ``train``: the other nine rows in ten of those writers. With ``partition=natural`` each of
      them is a client.

    Attributes:
        hub_id: owner/name on the hub, also the sub-folder of ``$DPFL_DATA_ROOT``.
        path: folder with the dataset's files, or None.
        mean: public mean of the values in [0, 1]; one value, as the images are grey.
        std: public standard deviation.
    """

    hub_id: str | None
    path: str | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        check_constants(self.mean, self.std)

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the dataset from the first of `data_path`, `path`, the data root and the hub.

        Raises:
            DataError: not there or not readable; without a network, within 10 seconds.
        """
        source = find_source(data_path, self.path, self.hub_id)
        facts = ("femnist", len(self.mean), SPLIT_SEED)
        decoded = hub.load_decoded(
            source, cache_dir, "femnist", facts, lambda folder: self._decode(source, folder)
        )
        return decoded.loaded(Standardize(largest=_LARGEST_VALUE, mean=self.mean, std=self.std))

    def _decode(self, source: Source, folder: Path) -> int:
        from fl_app.data.images import ImageLayout, decode_batch, open_images

        layout = ImageLayout(
            found_as=source.found_as,
            image_column="image",
            label_column="character",
            splits={"train": "train"},
            num_channels=len(self.mean),
            image_size=None,
        )
        with hub.readable(source.found_as, "FEMNIST", "complete Parquet files of flwrlabs/femnist"):
            table = open_images(source.location, None, layout, folder)["train"]
            hub.check_columns(table, {"path": "writer_id"})
            batches = [
                decode_batch(table[start : start + _BATCH_ROWS]["image"], layout)
                for start in range(0, table.num_rows, _BATCH_ROWS)
            ]
            labels = np.asarray(table["character"], dtype=np.int64)
            writers = np.asarray(table["writer_id"], dtype=np.str_)
            features = np.concatenate(batches)
        _check_labels(labels, source)
        write_splits(folder, features, labels, writers, ordered=False)
        return NUM_CLASSES


def _check_labels(labels: npt.NDArray[np.int64], source: Source) -> None:
    if labels.min() < 0 or labels.max() >= NUM_CLASSES:
        raise DataError(
            f"{source.found_as}: every character must be in 0..{NUM_CLASSES - 1}; "
            "remove rows without one"
        )


PLUGIN = Femnist
