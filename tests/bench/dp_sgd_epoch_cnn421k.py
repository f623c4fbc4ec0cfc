"""One DP-SGD epoch of a 421,642-parameter network against the same epoch without DP."""

from tests.bench._core import Ratio
from tests.bench._epoch import epoch, wide_cnn

BENCHMARK = Ratio(
    title="DP-SGD epoch, 28 x 28, batch 128, a CNN of 421,642 parameters",
    baseline="plain PyTorch",
    target=1.5,
    threads=1,
    work=epoch(wide_cnn),
)
