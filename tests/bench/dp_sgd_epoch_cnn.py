"""One DP-SGD epoch of the 21,840-parameter network against the same epoch without DP."""

from tests.bench._core import Ratio
from tests.bench._epoch import epoch, shipped_cnn

BENCHMARK = Ratio(
    title="DP-SGD epoch, 28 x 28, batch 128, cnn (21,840 parameters)",
    baseline="plain PyTorch",
    target=1.15,
    threads=1,
    work=epoch(shipped_cnn),
)
