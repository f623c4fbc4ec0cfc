"""Server Adam, FedAdam (Reddi et al. 2021, arXiv:2003.00295, Algorithm 2: no bias correction)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fl_app import checks, parallel
from fl_app.plugins import ServerOptimizer
from fl_app.stages import DoubleVector


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAdam(ServerOptimizer):
    """Adaptive step on the released mean change.

    Attributes:
        learning_rate: eta.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: added to the root of the second moment; also its start value's root, as in the paper.
    """

    learning_rate: float
    beta1: float
    beta2: float
    tau: float

    def __post_init__(self) -> None:
        checks.positive("server_optimizer.learning_rate", self.learning_rate)
        checks.positive("server_optimizer.tau", self.tau)
        for name in ("beta1", "beta2"):
            if not 0 <= checks.number(f"server_optimizer.{name}", getattr(self, name)) < 1:
                value = getattr(self, name)
                raise checks.fail(f"server_optimizer.{name}", value, "must be >= 0 and < 1")

    def start(self, num_parameters: int) -> dict[str, DoubleVector]:
        """Returns zero first moments and second moments of tau squared."""
        return {"first": np.zeros(num_parameters), "second": np.full(num_parameters, self.tau**2)}

    def step(
        self, parameters_P: DoubleVector, mean_P: DoubleVector, state: dict[str, DoubleVector]
    ) -> None:
        """Moves `parameters_P` and both moments in place."""
        first_P, second_P = state["first"], state["second"]

        def move(part: slice) -> None:
            first_P[part] *= self.beta1
            first_P[part] += (1 - self.beta1) * mean_P[part]
            second_P[part] *= self.beta2
            second_P[part] += (1 - self.beta2) * mean_P[part] ** 2
            step = self.learning_rate * first_P[part] / (np.sqrt(second_P[part]) + self.tau)
            parameters_P[part] += step

        parallel.each_part(parameters_P.size, move)


PLUGIN = ServerAdam
