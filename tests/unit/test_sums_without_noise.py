"""dp_sgd with placement central: what a client sends."""

import numpy as np
import pytest
from test_training import DP_SGD, build, job, rows_of, small_net, train, un_noised_sum

from fl_app.models import flat_parameters
from fl_app.stages import ClientPartition


@pytest.mark.parametrize(("noise", "order"), [("gaussian", 2), ("laplace", 1)])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_by_brute_force_one_record_moves_the_sum_by_at_most_c(
    noise: str, order: int, clipping: str
) -> None:
    values = {"noise": noise, "clipping": clipping, "placement": "central", "learning_rate": 7.0}
    training, partition = build(DP_SGD, **values), rows_of(8)
    partition.table.features[5 + 3] *= 1e3
    whole = train(training, partition, job(z=1.0))
    assert whole.num_noisy_steps == 0
    moved = []
    for left_out in range(8):
        rows = np.delete(partition.rows, left_out)
        rest = ClientPartition(client=2, table=partition.table, rows=rows)
        change = whole.delta_P - train(training, rest, job(z=1.0)).delta_P
        moved.append(np.linalg.norm(change.astype(np.float64), order))
    assert 0.9 * 0.5 < max(moved) <= 0.5 * (1 + 2e-5)


@pytest.mark.parametrize("size", [None, 1, 5])
def test_a_client_sends_minus_the_sum_that_a_local_step_noises(size: int | None) -> None:
    partition, model = rows_of(12), small_net()
    before = flat_parameters(model)
    training = build(DP_SGD, placement="central", batch_rate=0.5, physical_batch_size=size)
    update = training.train(model, partition, job(z=1.0))
    np.testing.assert_allclose(
        -update.delta_P, un_noised_sum(partition, batch_rate=0.5), rtol=1e-5, atol=3e-6
    )
    assert np.array_equal(flat_parameters(model), before)
    assert not training.train(small_net(), rows_of(0), job(z=1.0)).delta_P.any()
