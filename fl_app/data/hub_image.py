"""Any image classification dataset in the layout of the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from fl_app import checks
from fl_app.data.augmentation import KINDS, augmentation
from fl_app.data.holdout import check_fraction, set_aside
from fl_app.data.hub import load_decoded
from fl_app.data.source import Source, find_source
from fl_app.data.transform import Standardize, check_constants
from fl_app.plugins import Dataset
from fl_app.stages import LoadedData

_LARGEST_VALUE = 255.0
_NOT_STORED = ("path", "mean", "std", "augment")
"""Keys that do not change the stored arrays, beside the number of channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubImage(Dataset):
    """Images of one shape with one label each; looked up as DESIGN section 5 says.

    Attributes:
        hub_id: owner/name on the hub, also the sub-folder of ``$DPFL_DATA_ROOT``.
        path: folder with the dataset's files, or None.
        subset: the dataset's configuration name, None for its only one.
        image_column: name of the column that holds the images.
        label_column: name of the column that holds the labels.
        train_split: split that the clients' rows come from.
        test_split: the server's public test split.
        image_size: side length to resize to, None: as they are.
        mean: public mean of each channel, of values in [0, 1]; one value means grey images.
        std: public standard deviation of each channel.
        augment: none, or flip_crop: training rows are mirrored and shifted at random whenever they
            are trained on (see `FlipCrop`); not for images that mean another label in the mirror.
        validation_fraction: share of the training rows that nobody trains on, for choices made
            before a run (``run.evaluate_on=validation``).
    """

    hub_id: str | None
    path: str | None
    subset: str | None
    image_column: str
    label_column: str
    train_split: str
    test_split: str
    image_size: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str = "none"
    validation_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_constants(self.mean, self.std)
        checks.one_of("dataset.augment", self.augment, KINDS)
        check_fraction(self.validation_fraction)
        if self.image_size is not None:
            checks.at_least("dataset.image_size", self.image_size, 1)
        for name in ("hub_id", "path"):
            if getattr(self, name) == "":
                raise checks.fail(f"dataset.{name}", "''", "must not be empty", "set null for none")

    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the dataset from the first of `data_path`, `path`, the data root and the hub.

        Raises:
            DataError: not there or not readable; without a network, within 10 seconds.
        """
        source = find_source(data_path, self.path, self.hub_id)
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_STORED}
        name = (self.hub_id or source.location).rstrip("/").rpartition("/")[2]
        facts = ("image", values, len(self.mean))
        decode = set_aside(lambda folder: self._decode(source, folder), self.validation_fraction)
        decoded = load_decoded(source, cache_dir, name, facts, decode)
        data = decoded.loaded(Standardize(largest=_LARGEST_VALUE, mean=self.mean, std=self.std))
        return replace(data, train=replace(data.train, augmentation=augmentation(self.augment)))

    def _decode(self, source: Source, folder: Path) -> int:
        from fl_app.data.images import ImageLayout, decode_images

        layout = ImageLayout(
            found_as=source.found_as,
            image_column=self.image_column,
            label_column=self.label_column,
            splits={"train": self.train_split, "test": self.test_split},
            num_channels=len(self.mean),
            image_size=self.image_size,
        )
        return decode_images(source.location, self.subset, layout, folder)


PLUGIN = HubImage
