"""rpel.Peer in the user's own loop, the examples built on it,
and `rpel peer run` as operators start and stop it."""

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import rpel
from rpel import cli
from rpel.integrations.trainers import TransformersRounds
from rpel.models import flatten, model
from rpel.optim import LocalMomentum
from rpel.peer.core.protocol import Checkpoint, make_ready
from rpel.peer.core.wire import Layout, digest
from rpel.peer.state.store import Store
from rpel.rules import rule
from rpel.types import Outcome
from support.paths import ROOT
from support.thread_network import NetworkFiles, found
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

PERIOD = 1.2


def a_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(2, 1)


LAYOUT = Layout.of(a_model().named_parameters())
SAMPLE = Layout.of(model("linear").named_parameters())


def a_network(folder: Path, n: int = 4, **terms: Any) -> NetworkFiles:
    terms = {"rounds": 3, "period": PERIOD, "soon": 3.0} | terms
    return found(folder, n, layout=LAYOUT, initial=flatten(a_model()).numpy(), **terms)


def path(files: NetworkFiles, number: int) -> Path:
    return files.folder / f"peer-{number}" / "peer.toml"


def test_peer_is_made_from_objects_or_from_a_file(tmp_path: Path) -> None:
    net = a_network(tmp_path)
    home = tmp_path / "peer-1"
    files = {name: str(home / name) for name in ("state_dir", "log")}
    keys = {"key": str(home / "peer.key"), "certificate": str(home / "peer.crt")}
    own = {"id": "peer-1", "members": str(tmp_path / "members.toml"), **files, **keys}
    made = [rpel.Peer(path(net, 1)), rpel.Peer(config=net.configs[1]), rpel.Peer(config=own)]
    assert [peer.summary()["id"] for peer in made] == ["peer-1"] * 3
    assert made[2].model_path == home / "state_dir" / "model.safetensors"
    with pytest.raises(ValueError, match=r"config=.*not both"):
        rpel.Peer(path(net, 1), config=net.configs[1])
    with pytest.raises(ValueError, match=r"'listens'.*'listen'"):
        rpel.Peer(config={"id": "peer-1", "listens": "127.0.0.1:7443"})


def train_step(network: nn.Module, optimizer: torch.optim.Optimizer, slope: float) -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    optimizer.zero_grad()
    (network(x) - slope).square().mean().backward()
    optimizer.step()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What a process does once: kernels, and what torch imports with the first step of an optimiser."""
    make_ready(rule("nnm+trimmed_mean", f=1), 3, 3, np.float32)
    network = a_model()
    train_step(network, LocalMomentum(network.parameters(), lr=0.1), slope=1.0)


def together(n: int, work: Callable[[int], Any]) -> list[Any]:
    """work(i) for each peer, in threads; what one raises is raised here."""
    results: list[Any] = [None] * n

    def one(i: int) -> None:
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# --- the loop -----------------------------------------------------------------------------------------------


def test_user_training_loop_ends_with_the_aggregate(tmp_path: Path) -> None:
    files = a_network(tmp_path, byzantine=1)

    def work(i: int) -> tuple[list[Any], np.ndarray, dict[str, Any]]:
        network = nn.Linear(2, 1)  # what it begins with does not matter: the network's first model is loaded
        optimizer = LocalMomentum(network.parameters(), lr=0.1)
        rounds = []
        with rpel.Peer(path(files, i)) as peer:
            for round in peer.rounds(network, state={"optimizer": optimizer}):
                rounds.append(round)
                train_step(network, optimizer, slope=1.0 + i)
            return rounds, flatten(network).numpy(), peer.summary()

    results = together(4, work)
    for rounds, x, summary in results:
        assert [round.number for round in rounds] == [1, 2, 3]
        assert [round.outcome for round in rounds] == [None, "aggregated", "aggregated"]
        assert (rounds[1].asked, rounds[1].received, rounds[1].trim) == (3, 3, 1)
        np.testing.assert_allclose(x, results[0][1], rtol=1e-6)
        assert summary["outcomes"]["aggregated"] == 3
    assert not np.allclose(results[0][1], flatten(a_model()).numpy())


def test_final_model_file_with_buffers_loads_strictly(tmp_path: Path) -> None:
    def normed() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    layout = Layout.of(normed().named_parameters())
    initial = flatten(normed()).numpy()
    files = found(tmp_path, 3, rounds=2, period=PERIOD, soon=2.0, layout=layout, initial=initial)

    def work(i: int) -> tuple[Path, nn.Module]:
        network = normed()
        optimizer = LocalMomentum(network.parameters(), lr=0.1)
        with rpel.Peer(path(files, i)) as peer:
            for _ in peer.rounds(network, state={"optimizer": optimizer}):
                train_step(network, optimizer, slope=1.0 + i)
            return peer.model_path, network

    for exported, network in together(3, work):
        twin = normed()
        twin.load_state_dict(safetensors.torch.load_file(exported), strict=True)
        for name, value in network.state_dict().items():
            assert torch.equal(value, twin.state_dict()[name]), name
        assert twin.state_dict()["1.num_batches_tracked"] == 2
    with rpel.Peer(path(files, 0)) as peer:  # after the end there are no rounds, and the last model is loaded
        late = normed()
        assert list(peer.rounds(late, state={"optimizer": LocalMomentum(late.parameters(), lr=0.1)})) == []
    for name, value in late.state_dict().items():
        assert torch.equal(value, safetensors.torch.load_file(peer.model_path)[name]), name


def test_loop_can_be_entered_again_in_the_same_process(tmp_path: Path) -> None:
    files = a_network(tmp_path, 2, rounds=2)
    files.membership = files.membership.replace(pull=1, b_hat=0)
    files.membership.save(tmp_path / "members.toml")

    def work(i: int) -> list[int]:
        network, numbers = a_model(), []
        with rpel.Peer(path(files, i)) as peer:
            for round in peer.rounds(network):
                numbers.append(round.number)
                break
            numbers.extend(round.number for round in peer.rounds(network))
        return numbers

    for numbers in together(2, work):
        assert numbers[0] == 1
        assert numbers[-1] == 2


def test_model_of_another_shape_is_refused_before_any_round(tmp_path: Path) -> None:
    files = a_network(tmp_path, 2)
    with rpel.Peer(path(files, 0)) as peer, pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 2\)"):
        peer.rounds(nn.Linear(3, 1))


# --- the examples -------------------------------------------------------------------------------------------


def example(name: str) -> ModuleType:
    """A file of examples/ as a module."""
    spec = spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_pytorch_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer_pytorch = example("peer_pytorch")

    module = peer_pytorch.make_model()
    files = found(
        tmp_path,
        3,
        rounds=3,
        period=PERIOD,
        soon=3.0,
        layout=Layout.of(module.named_parameters()),
        initial=flatten(module).numpy(),
    )
    accuracies = together(3, lambda i: peer_pytorch.train(path(files, i)))
    assert min(accuracies) > 0.15  # better than chance after three steps
    assert capsys.readouterr().out.count("round 3: loss") == 3


def test_trainer_callback_makes_each_optimiser_step_a_round(tmp_path: Path) -> None:
    """Driven by its hooks in the order in which transformers documents and calls them."""
    files = a_network(tmp_path, byzantine=1)

    def work(i: int) -> tuple[int, np.ndarray]:
        network = a_model()
        optimizer = LocalMomentum(network.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        control, steps = SimpleNamespace(should_training_stop=False), 0
        given = {"model": network, "optimizer": optimizer, "lr_scheduler": schedule}
        with rpel.Peer(path(files, i)) as peer:
            callback = TransformersRounds(peer)
            callback.on_train_begin(None, None, control, **given)
            while not control.should_training_stop:
                assert callback.round.number == steps + 1
                train_step(network, optimizer, slope=1.0 + i)
                schedule.step()
                steps += 1
                callback.on_step_end(None, None, control, **given)
        return steps, flatten(network).numpy()

    results = together(4, work)
    assert [steps for steps, _ in results] == [3] * 4
    for _, x in results:
        np.testing.assert_allclose(x, results[0][1], rtol=1e-6)


# --- rpel peer run ------------------------------------------------------------------------------------------


def started(files: NetworkFiles, number: int, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rpel", "peer", "run", "--config", str(path(files, number)), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def a_sample(folder: Path, rounds: int, soon: float) -> NetworkFiles:
    """Three peers that learn the MNIST sample with a linear model."""
    module = model("linear")
    return found(
        folder,
        3,
        rounds=rounds,
        period=PERIOD,
        soon=soon,
        layout=SAMPLE,
        initial=flatten(module).numpy(),
        hyperparameters={"model": "linear", "lr": 0.05, "eval_every": 1},
    )


def test_peer_run_prints_a_summary_and_writes_the_final_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = a_sample(tmp_path, rounds=3, soon=5.0)

    def work(i: int) -> None:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main(["peer", "run", "--config", str(path(files, i)), *(["--json"] if i else [])])

    together(3, work)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    (ended,) = [
        line for line in lines if line.startswith("peer-0: finished with round 3 of 3; rounds here: ")
    ]
    assert ended.endswith(f"the model is {files.configs[0].state_dir / 'model.safetensors'}")
    for summary in map(json.loads, [line for line in lines if line != ended]):
        assert (summary["round"], summary["rounds"], summary["over"]) == (3, 3, False)
        assert 0 <= summary["accuracy"] <= 1
    assert "one of 3 members; round 1 begins" in err
    assert err.count("round 3: ") == 3
    for i, config in enumerate(files.configs):
        exported, module = config.state_dir / "model.safetensors", model("linear")
        module.load_state_dict(safetensors.torch.load_file(exported), strict=True)
        with safetensors.safe_open(exported, "pt") as file:
            assert file.metadata()["round"] == "3"
            assert file.metadata()["digest"] == digest(SAMPLE, flatten(module).numpy())
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main(["peer", "run", "--config", str(path(files, i))])
        assert (
            f"peer-{i}: the run is over, after 3 rounds; the model is {exported}" in capsys.readouterr().out
        )


def test_stored_round_can_be_exported_at_any_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = a_network(tmp_path, 3)
    x = np.arange(3.0, dtype=np.float32)

    def export(status: int, *more: str) -> str:
        with pytest.raises(SystemExit, match=str(status)):
            cli.main(
                [
                    "peer",
                    "export",
                    "--config",
                    str(path(files, 0)),
                    "-o",
                    str(tmp_path / "m.safetensors"),
                    *more,
                ]
            )
        said = capsys.readouterr()
        return said.out + said.err

    assert "no round has ended here yet" in export(2)
    with Store(files.configs[0].state_dir, LAYOUT) as store:  # as if the peer ran
        for t in (1, 2, 3):
            store.save(
                Checkpoint(t, x + t, fresh=False, degraded=0, outcome=Outcome.AGGREGATED), {"n": np.array(t)}
            )
        assert "peer-0's model after round 3 of 3" in export(0)
        assert "round 1 is not kept" in export(2, "--round", "1")
        assert "choose 2 or 3" in export(2, "--round", "1")
        assert json.loads(export(0, "--round", "2", "--json"))["round"] == 2
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["digest"] == digest(LAYOUT, x + 2)
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert found.pop("n") == 2
    a_model().load_state_dict(found, strict=True)
    (files.configs[0].state_dir / "checkpoint-3.json").write_bytes(b"half of it")
    assert "model after round 2" in export(0)
    assert "cannot be read" in export(2, "--round", "3")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_sigterm_ends_a_peer_in_order(tmp_path: Path, number: signal.Signals, status: int) -> None:
    files = a_sample(tmp_path, rounds=1000, soon=1.0)
    process = started(files, 0)
    assert process.stderr is not None
    # then a round has ended
    said = list(takewhile(lambda line: not line.startswith("round "), process.stderr))
    assert "peer-0 listens at 127.0.0.1:" in said[0]
    assert "one of 3 members" in said[0]
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert "everything is on disk" in err
    assert "Traceback" not in err
    with Store(files.configs[0].state_dir, Layout.of(model("linear").named_parameters())) as store:
        assert store.memory().checkpoint is not None


class Heard(logging.Handler):
    """Keeps what the library says, and can be waited for."""

    def __init__(self, wanted: str) -> None:
        super().__init__(logging.INFO)
        self.wanted, self.said, self.event = wanted, list[str](), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if self.wanted in self.said[-1]:
            self.event.set()


def test_starting_peer_names_members_whose_clocks_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = a_network(tmp_path, byzantine=1, period=600.0, soon=600.0)
    heard = Heard("waiting until 2 members tell their clocks; 0 did, not yet: peer-1, peer-2, peer-3")
    log = logging.getLogger("rpel")
    caplog.set_level(logging.INFO, "rpel")
    log.addHandler(heard)
    network = a_model()
    with rpel.Peer(path(files, 0)) as peer:
        loop = threading.Thread(target=lambda: list(peer.rounds(network)), daemon=True)
        loop.start()
        try:
            assert heard.event.wait(PATIENCE), heard.said
        finally:
            peer.stop()
            loop.join(PATIENCE)
            log.removeHandler(heard)
    assert heard.said[0].startswith("peer-0 listens at 127.0.0.1:")
