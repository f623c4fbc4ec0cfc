"""Plain server step: FedAvg when the learning rate is 1 (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

from dataclasses import dataclass

from fl_app import checks, parallel
from fl_app.plugins import ServerOptimizer
from fl_app.stages import DoubleVector


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSgd(ServerOptimizer):
    """Adds `learning_rate` times the released mean change to the model."""

    learning_rate: float

    def __post_init__(self) -> None:
        checks.positive("server_optimizer.learning_rate", self.learning_rate)

    def start(self, num_parameters: int) -> dict[str, DoubleVector]:
        """Returns no state."""
        return {}

    def step(
        self, parameters_P: DoubleVector, mean_P: DoubleVector, state: dict[str, DoubleVector]
    ) -> None:
        """Moves `parameters_P` in place."""

        def move(part: slice) -> None:
            parameters_P[part] += self.learning_rate * mean_P[part]

        parallel.each_part(parameters_P.size, move)


PLUGIN = ServerSgd
