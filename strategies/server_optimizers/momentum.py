"""Server momentum, FedAvgM (Hsu et al. 2019, arXiv:1909.06335)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fl_app import checks, parallel
from fl_app.plugins import ServerOptimizer
from fl_app.stages import DoubleVector


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMomentum(ServerOptimizer):
    """Keeps v = momentum v + mean change, and adds `learning_rate` v to the model."""

    learning_rate: float
    momentum: float

    def __post_init__(self) -> None:
        checks.positive("server_optimizer.learning_rate", self.learning_rate)
        if not 0 <= checks.number("server_optimizer.momentum", self.momentum) < 1:
            raise checks.fail("server_optimizer.momentum", self.momentum, "must be >= 0 and < 1")

    def start(self, num_parameters: int) -> dict[str, DoubleVector]:
        """Returns a zero velocity."""
        return {"velocity": np.zeros(num_parameters)}

    def step(
        self, parameters_P: DoubleVector, mean_P: DoubleVector, state: dict[str, DoubleVector]
    ) -> None:
        """Moves `parameters_P` and the velocity in place."""
        velocity_P = state["velocity"]

        def move(part: slice) -> None:
            velocity_P[part] *= self.momentum
            velocity_P[part] += mean_P[part]
            parameters_P[part] += self.learning_rate * velocity_P[part]

        parallel.each_part(parameters_P.size, move)


PLUGIN = ServerMomentum
