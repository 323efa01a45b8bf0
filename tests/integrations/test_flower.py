"""rpel's rules as a Flower strategy, in Flower's own simulation runtime.
Run by `make test-all` where flwr is."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr, which make test-all installs")
pytest.importorskip("ray", reason="needs flwr[simulation], which make test-all installs")

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from rpel.integrations.flower import RpelStrategy

pytestmark = pytest.mark.full
TARGET = np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)


def trained(strategy: FedAvg) -> np.ndarray:
    """Ten rounds among seven clients of which two answer with 100 times nonsense and one with the wrong
    shape."""
    client, kept = ClientApp(), {}

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: object) -> Message:
        number = int(context.node_config["partition-id"])  # type: ignore[attr-defined]
        (x,) = message.content["arrays"].to_numpy_ndarrays()
        step = x + 0.5 * (TARGET + 0.01 * number - x)
        answer = [-100 * step] if number < 2 else [np.zeros(3, np.float32)] if number == 2 else [step]
        metrics = MetricRecord({"num-examples": 10**6 if number < 2 else 10})
        return Message(
            content=RecordDict({"arrays": ArrayRecord(answer), "metrics": metrics}), reply_to=message
        )

    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: object, context: object) -> None:
        start = ArrayRecord([np.zeros((2, 2), np.float32)])
        result = strategy.start(grid=grid, initial_arrays=start, num_rounds=10)
        kept["x"] = result.arrays.to_numpy_ndarrays()[0]

    run_simulation(server_app=server, client_app=client, num_supernodes=7)
    return np.asarray(kept["x"])


def test_server_with_a_robust_rule_learns_among_hostile_clients() -> None:
    found = trained(RpelStrategy("nnm+trimmed_mean", f=2, fraction_evaluate=0.0))
    assert np.abs(found - TARGET).max() < 0.2
