"""How the clipping norm moves between rounds (Andrew et al. 2021, arXiv:1905.03871).

The server sees the released share of updates within C, noise and all, and moves the C of the *next*
round; what was sent and noised this round stays as it is.
"""

from __future__ import annotations

import math

from fl_app import checks
from fl_app.mechanisms._additive import AdditiveMechanism
from fl_app.plugins import Mechanism
from fl_app.stages import Release


def next_clipping_norm(mechanism: Mechanism, clipping_norm: float, release: Release) -> float:
    """Returns C exp(-eta (share within - gamma)) (section 2.1); C itself if it is fixed."""
    if not isinstance(mechanism, AdditiveMechanism) or release.fraction_within is None:
        return clipping_norm
    if mechanism.target_quantile is None:
        return clipping_norm
    excess = release.fraction_within - mechanism.target_quantile
    moved = clipping_norm * math.exp(-mechanism.clipping_learning_rate * excess)
    least, largest = checks.CLIPPING_NORMS
    return min(max(moved, least), largest)
