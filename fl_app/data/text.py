"""Characters as tokens of a fixed public vocabulary."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fl_app.errors import DataError
from fl_app.plugins import Transform

WINDOW = 80
"""Characters of one input."""
CHARACTERS = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]"
CHARACTERS += string.ascii_lowercase + "}"
"""The 80 characters of LEAF's Shakespeare (Caldas et al. 2018, arXiv:1812.01097)."""
NUM_TOKENS = len(CHARACTERS) + 1
"""The last token is every other character. Public, so it tells nothing about anybody's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Transform):
    """Passes stored tokens on as int64."""

    def __call__(self, stored: npt.NDArray[Any]) -> torch.Tensor:
        """Returns int64 [B, L] of `stored` [B, L]; B may be 0."""
        return torch.from_numpy(np.array(stored, dtype=np.int64))


def encode(texts: Sequence[str], length: int, where: str) -> npt.NDArray[np.uint8]:
    """Returns the tokens [N, length] of N texts.

    Args:
        texts: the texts.
        length: characters that each of them must have.
        where: begins the error text.

    Raises:
        DataError: a text of another length.
    """
    if any(not isinstance(text, str) or len(text) != length for text in texts):
        raise DataError(f"{where}: every text must have {length} character(s); repair those rows")
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    table = np.full(256, NUM_TOKENS - 1, dtype=np.uint8)
    table[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))
    # Codes above 255 all become 255, which is no character of the vocabulary.
    tokens: npt.NDArray[np.uint8] = table[np.minimum(codes, 255)]
    return tokens.reshape(len(texts), length)
