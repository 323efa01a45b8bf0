"""Runs from Python: what they keep, that they are not repeated, own models and data, seeds, faults,
certificate."""

import inspect
import json
import logging
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import rpel
from rpel.config.spec import Spec
from rpel.data import Dataset, user
from rpel.data import load as dataset
from rpel.runs.columns import COLUMNS
from rpel.runs.folder import RunFolder
from rpel.runs.record import Result, Results
from rpel.simulation import callbacks
from rpel.simulation import run as runs
from rpel.simulation.api import Fields, Interrupted, Tick, resume, simulate
from rpel.simulation.inputs import Objects
from support.runs import TINY, CrashError, crash_after, differences, tiny

FILES = {
    "spec.toml", "metrics.jsonl", "certificate.json", "counts.npz", "nodes.npz", "models.safetensors",
    "checkpoint",
}  # fmt: skip
EVALUATED = COLUMNS[1:8]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return tiny(tmp_path_factory.mktemp("runs"))


def test_run_folder_holds_what_is_promised(finished: Result) -> None:
    path = finished.path
    assert path is not None
    assert {p.name for p in path.iterdir()} - {".lock"} == FILES
    assert path.name.startswith("run-")
    assert len(path.name) == len("run-") + 12
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert tuple(row) == COLUMNS
        assert all((row[key] is None) == (row["round"] % 2 == 1) for key in EVALUATED)
    assert (rows[0]["messages"], rows[0]["bytes"]) == (8 * 4, 8 * 4 * 4 * 7850)
    proof = json.loads((path / "certificate.json").read_text())
    promised = (
        "plan guarantee held max_observed histogram violations violations_total seed versions "
        "threads data rule"
    )
    promised += " objects privacy aggregations"
    assert set(proof) == set(promised.split())
    assert (proof["held"], sum(proof["histogram"]), proof["plan"]["b_hat"]) == (True, 6 * 7, 1)
    counts, nodes = np.load(path / "counts.npz"), np.load(path / "nodes.npz")
    assert counts["counts"].shape == (6, 7)
    assert counts["counts"].max(axis=1).tolist() == [row["byzantine_max"] for row in rows]
    assert nodes["round"].tolist() == [0, 2, 4, 6]
    assert len(set(nodes["accuracy"][0])) == 1, "all begin with one model"
    assert nodes["accuracy"][1:].mean(axis=1).tolist() == [
        row["accuracy_mean"] for row in rows if row["loss"]
    ]
    tensors = load_file(path / "models.safetensors")
    assert (tensors["models"].shape, tensors["ids"].shape) == ((7, 7850), (7,))
    assert tensors["models"].dtype == np.float32


def test_equal_runs_give_equal_bytes_and_learning_happens(finished: Result, tmp_path: Path) -> None:
    again = tiny(tmp_path)
    assert finished.path is not None
    assert again.path is not None
    assert differences(finished.path, again.path) == []
    assert again.accuracy_mean > again.history["accuracy_mean"][1] > 0.2


def test_result_is_a_table_models_and_a_picture(finished: Result) -> None:
    assert finished.history.columns == COLUMNS
    assert np.isnan(finished.history["loss"][0])
    assert len(finished.history.where("loss")) == 3
    assert finished.history.to_csv().splitlines()[0] == ",".join(COLUMNS)
    assert "<table>" in finished.history._repr_html_()
    assert "accuracy_mean" in str(finished.history)
    assert finished.models.shape == (7, 7850)
    assert finished.accuracy_worst == finished.nodes["accuracy"][-1].min()
    assert finished.lowest()[-1] == finished.accuracy_worst
    labels = [text.get_text() for text in finished.plot().axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["mean of the honest nodes", "worst node of each round", "node that ends lowest"]
    with pytest.raises(KeyError, match="accuracy_mean"):
        finished.history["accuracy"]


def test_finished_run_is_not_repeated_unless_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = tiny(tmp_path)
    ticks: list[Tick] = []
    with caplog.at_level(logging.INFO):
        stored = tiny(tmp_path, progress=ticks.append)
    assert (stored.reused, ticks) == (True, [])
    assert "is finished and not repeated" in caplog.text
    assert "other code" not in caplog.text
    assert np.array_equal(stored.models, first.models)
    assert stored.history.rows() == first.history.rows()
    assert not tiny(tmp_path, progress=ticks.append, force=True).reused
    assert [tick.round for tick in ticks] == [1, 2, 3, 4, 5, 6]


def test_different_specifications_never_share_a_folder(finished: Result, tmp_path: Path) -> None:
    others = [tiny(tmp_path, lr=0.2), tiny(tmp_path, seed=1), tiny(tmp_path, attack="foe")]
    names = {result.path.name for result in (finished, *others) if result.path}
    assert len(names) == 4


def test_run_with_out_none_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = tiny(None)
    assert result.path is None
    assert result.models.shape == (7, 7850)
    assert list(tmp_path.iterdir()) == []


# --- stopping and going on ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attack": "label_flip"},
        {"attack": "stale"},
        {"attack": "mimic_heuristic", "attack_params": {"learning_rounds": 4}},
        {"output": "uniform", "no_show": 0.2, "local_steps": 2},
        {"method": "all-to-all", "pull": 7, "model": "C(2)-B-R-M-L(10)-S"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "plain",
)
def test_run_that_crashed_goes_on_to_the_same_bytes(fields: dict[str, Any], tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", **fields).path
    with pytest.raises(CrashError):
        tiny(tmp_path / "crashed", **fields, progress=crash_after(5))
    assert whole is not None
    path = tmp_path / "crashed" / whole.name
    assert [t for t, _ in RunFolder(path).checkpoints] == [4]
    ticks: list[Tick] = []
    resume(path, progress=ticks.append)
    assert [tick.round for tick in ticks] == [5, 6]
    assert differences(whole, path) == []


@pytest.mark.parametrize("damage", ["no checkpoint", "truncated checkpoint", "short metrics"])
def test_run_without_a_valid_checkpoint_begins_again(
    finished: Result, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert finished.path is not None
    with pytest.raises(CrashError):
        tiny(tmp_path, progress=crash_after(1 if damage == "no checkpoint" else 5))
    path = tmp_path / finished.path.name
    if damage == "truncated checkpoint":
        file = RunFolder(path).checkpoints[0][1]
        file.write_bytes(file.read_bytes()[:5000])
    if damage == "short metrics":
        (path / "metrics.jsonl").write_text("")
    tiny(tmp_path)  # running again goes on as well
    assert differences(finished.path, path) == []
    expected = {"no checkpoint": "", "truncated checkpoint": "damaged", "short metrics": "round 0"}
    assert expected[damage] in caplog.text


def test_signal_is_obeyed_between_rounds_after_saving(finished: Result, tmp_path: Path) -> None:
    def interrupt(tick: Tick) -> None:
        if tick.round == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"round 3 of 6.*rpel resume") as stopped:
        tiny(tmp_path, progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    path = stopped.value.path
    assert path is not None
    assert [t for t, _ in RunFolder(path).checkpoints] == [3]
    resume(path)
    assert finished.path is not None
    assert differences(finished.path, path) == []


def test_signal_in_the_last_evaluation_loses_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "LONG", 0.0)
    many: dict[str, Any] = {"nodes": 90, "byzantine": 1, "pull": 4, "b_hat": 1, "rounds": 3, "eval_every": 2}
    shares: list[float] = []

    def interrupt(tick: Tick) -> None:
        if tick.evaluated is not None:
            shares.append(tick.evaluated)
            signal.raise_signal(signal.SIGINT)

    whole = simulate("linear", **many, out=tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"round 3 of 3.*rpel resume") as stopped:
        simulate("linear", **many, out=tmp_path / "stopped", progress=interrupt)
    path = stopped.value.path
    assert path is not None
    assert whole.path is not None
    assert len(shares) == 1
    assert [t for t, _ in RunFolder(path).checkpoints] == [3]
    assert len(RunFolder(path).metrics()) == 2
    rounds: list[int] = []
    resume(
        path, progress=lambda tick: rounds.append(tick.round) if tick.evaluated is None else shares.append(1)
    )
    assert rounds == [3]
    assert len(shares) > 1
    assert differences(whole.path, path) == []


def test_resuming_a_finished_run_returns_it(finished: Result, caplog: pytest.LogCaptureFixture) -> None:
    assert finished.path is not None
    with caplog.at_level(logging.INFO):
        assert resume(finished.path).reused
    assert "finished" in caplog.text


def test_changed_specification_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        tiny(tmp_path, progress=crash_after(3))
    (path,) = tmp_path.iterdir()
    spec = path / "spec.toml"
    spec.write_text(spec.read_text().replace("lr = 0.1", "lr = 0.3"))
    with pytest.raises(ValueError, match="specification"):
        resume(path)
    renamed = path.rename(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"checkpoint in .*specification"):
        resume(renamed)


def test_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.savez

    def full(file: Any, **arrays: Any) -> None:
        if len(arrays["record.counts"]) == 4:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        real(file, **arrays)

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        tiny(tmp_path)
    (path,) = tmp_path.iterdir()
    assert [t for t, _ in RunFolder(path).checkpoints] == [2]
    monkeypatch.undo()
    assert len(resume(path).history) == 6


def test_certificate_comes_after_all_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[set[str]] = []
    real = RunFolder.write_json

    def write(self: RunFolder, name: str, content: Any) -> None:
        there.append({p.name for p in self.path.iterdir()})
        real(self, name, content)

    monkeypatch.setattr(RunFolder, "write_json", write)
    tiny(tmp_path)
    assert FILES - {"certificate.json"} <= there[0]
    assert "certificate.json" not in there[0]


def test_lines_are_durable_before_the_checkpoint_that_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fsync by what is synced: metrics.jsonl with its lines, then the checkpoint's file."""
    seen: list[tuple[str, int]] = []
    real = os.fsync

    def sync(handle: int) -> None:
        here = os.fstat(handle).st_ino
        synced = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_ino == here]
        seen.extend(
            (path.name, path.read_bytes().count(b"\n") * (path.suffix == ".jsonl")) for path in synced
        )
        real(handle)

    monkeypatch.setattr(os, "fsync", sync)
    tiny(tmp_path)
    for t in (2, 4):
        at = seen.index((f".round-{t:08d}.npz.tmp", 0))
        assert ("metrics.jsonl", t) in seen[:at], seen


def test_last_round_is_evaluated_on_all_test_examples(finished: Result) -> None:
    *before, last = finished.nodes["accuracy"]
    size = len(dataset("mnist-sample").test_y)
    assert size > TINY["eval_size"]
    np.testing.assert_allclose(np.array(before) * TINY["eval_size"] % 1, 0, atol=1e-9)
    np.testing.assert_allclose((last * size + 0.5) % 1, 0.5, atol=1e-6)
    assert (np.abs((last * TINY["eval_size"] + 0.5) % 1 - 0.5) > 1e-6).any(), (
        "a subset would give coarser numbers"
    )


def test_simulate_has_a_keyword_for_every_field_with_its_default() -> None:
    keywords = inspect.signature(simulate).parameters
    others = {
        "callbacks",
        "problem",
        "train",
        "test",
        "loss",
        "metric",
        "collate",
        "task",
        "progress",
        "force",
        "reuse",
        "tensorboard",
    }
    assert keywords.keys() - others == Spec.model_fields.keys()
    for key, field in Spec.model_fields.items():
        if key not in ("model", "out"):
            assert keywords[key].default == field.default, key
    assert keywords["out"].default is None, "nothing is kept unless told"
    assert {"seeds", "model", "out"} | Fields.__annotations__.keys() == Spec.model_fields.keys()
    with pytest.raises(ValueError, match=r"'nods'.*'nodes'"):
        simulate(nods=3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seeds": 3}, r"seeds 3 is one number.*seed=3.*seeds=\[3\].*seeds=range\(3\)"),
        ({"attack": None}, "attack None is not possible.*'none': no attack"),
        ({"attack": 3}, "attack 3 is of type int"),
        ({"rule": 3}, "rule 3 is of type int.*'nnm.trimmed_mean'"),
        ({"out": Path("/proc/x")}, "/proc/x cannot be created"),
    ],
)
def test_wrong_argument_is_refused_in_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        tiny(fields.pop("out", None), **fields)


def test_load_of_a_folder_that_is_not_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^there is no run folder '.*nowhere'$"):
        rpel.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not a run folder: it holds no spec\.toml$"):
        rpel.load(tmp_path)
    with pytest.raises(CrashError):
        tiny(tmp_path, progress=crash_after(3))
    (unfinished,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match="is not finished: rpel resume"):
        rpel.load(unfinished)


def test_seed_gives_a_run_and_seeds_a_run_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = simulate("linear", nodes=6, byzantine=1, rounds=1, eval_size=50)
    both = simulate("linear", nodes=6, byzantine=1, rounds=1, eval_size=50, seeds="0,1")
    assert_type(one, rpel.Run)
    assert_type(both, rpel.RunSet)
    assert (type(one), type(both)) == (rpel.Run, rpel.RunSet)
    assert list(tmp_path.iterdir()) == [], "nothing is kept unless told"
    assert (len(both), both[0].spec.seed, both[1].spec.seed) == (2, 0, 1)
    assert (one.certificate["held"], one.certificate.held, one.certificate.b_hat) == (
        True,
        True,
        one.spec.b_hat,
    )
    assert json.loads(json.dumps(one.certificate)) == one.certificate
    with pytest.raises(ValueError, match="out='runs'"):
        rpel.load(one.path)


def test_run_reads_its_files_lazily(finished: Result, tmp_path: Path) -> None:
    assert finished.path is not None
    path = shutil.copytree(finished.path, tmp_path / finished.path.name)
    loaded = rpel.load(path)
    for name in ("models.safetensors", "nodes.npz"):
        (path / name).unlink()
    assert loaded.accuracy_mean == finished.accuracy_mean
    with pytest.raises(ValueError, match=r"models\.safetensors is missing"):
        _ = loaded.models


@pytest.mark.parametrize("damage", ["missing", "truncated"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "certificate.json", "nodes.npz", "models.safetensors"])
def test_missing_or_truncated_file_of_a_run_is_named(
    name: str, damage: str, finished: Result, tmp_path: Path
) -> None:
    assert finished.path is not None
    path = shutil.copytree(finished.path, tmp_path / finished.path.name)
    content = (path / name).read_bytes()
    (path / name).unlink()
    if damage == "truncated":
        (path / name).write_bytes(content[: len(content) // 2])
    said = "not finished" if (name, damage) == ("certificate.json", "missing") else str(path / name)
    with pytest.raises(ValueError, match=re.escape(said)):
        [getattr(rpel.load(path), what) for what in ("history", "nodes", "models")]


# --- own models, own data, seeds ----------------------------------------------------------------------------


def blobs(seed: int, count: int = 240) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    return (rng.normal(size=(count, 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def fixed_net(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


OWN: dict[str, Any] = {**TINY, "batch_size": 10, "rounds": 12, "lr": 1.0}
del OWN["model"]


def test_simulate_takes_any_module_data_and_loss(tmp_path: Path) -> None:
    def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - nn.functional.one_hot(target, 3)) ** 2).mean()

    train = torch.utils.data.TensorDataset(*(torch.from_numpy(a) for a in blobs(0)))
    a = simulate(fixed_net(), train, blobs(1), **OWN, out=tmp_path)
    b = simulate(
        fixed_net(), [(x, int(y)) for x, y in zip(*blobs(0), strict=True)], blobs(1), **OWN, out=tmp_path
    )
    assert a.path is not None
    assert b.path is not None
    assert b.path.name.startswith(f"{a.path.name}-")  # equal data, however they came
    assert np.array_equal(a.models, b.models)
    assert a.accuracy_mean > 0.7
    others = [
        simulate(fixed_net(1), blobs(0), blobs(1), **OWN, out=tmp_path),
        simulate(fixed_net(), blobs(2), blobs(1), **OWN, out=tmp_path),
        simulate(fixed_net(), blobs(0), blobs(1), squared, **OWN, out=tmp_path),
    ]
    assert len({result.path for result in (a, *others)}) == 4


def test_data_sets_of_other_content_have_other_checksums() -> None:
    dataset = Dataset("mine", *blobs(0), *blobs(1), 3, (0.0,), (1.0,))
    other = Dataset("mine", *blobs(2), *blobs(1), 3, (0.0,), (1.0,))
    one, same, another = (user.dataset(given, None).checksums for given in (dataset, dataset, other))
    assert one == same != another


def test_own_objects_are_needed_again_to_resume(tmp_path: Path) -> None:
    own: dict[str, Any] = {"model": fixed_net(), "train": blobs(0), "test": blobs(1)}
    whole = simulate(**own, **OWN, out=tmp_path / "whole").path
    with pytest.raises(CrashError):
        simulate(**own, **OWN, out=tmp_path / "crashed", progress=crash_after(5))
    (path,) = (tmp_path / "crashed").iterdir()
    with pytest.raises(ValueError, match=r"rpel\.resume"):
        resume(path)
    with pytest.raises(ValueError, match=r"specification.*data.*model"):
        resume(path, fixed_net(1), blobs(0), blobs(1))
    resume(path, **own)
    assert whole is not None
    assert differences(whole, path) == []


class Line(nn.Module):
    """One number from five, with a BatchNorm whose statistics stay with the node."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.norm(x))
        return result


def numbers(seed: int, count: int = 240) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32)
    return x, (x @ np.arange(5.0))[:, None].astype(np.float64)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


REGRESSION: dict[str, Any] = {**OWN, "partition": "iid", "lr": 0.1, "rounds": 40, "eval_every": 10}


def test_float_targets_are_learned_with_user_loss_and_metric(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = simulate(Line(), numbers(0), numbers(1), squared_error, **REGRESSION, out=tmp_path)
    losses = plain.history.where("loss")["loss"]
    assert losses[-1] < 0.2 * plain.nodes["metric.loss"][0, 0], "the loss of the initial model"
    assert (plain.measure, plain.more_is_better) == ("loss", False)
    assert plain.final["metric.loss_mean"] == pytest.approx(losses[-1])
    assert plain.final["metric.loss_worst"] == pytest.approx(plain.nodes["metric.loss"][-1].max())
    assert plain.final["accuracy_mean"] is None, "a regression has no accuracy"
    assert repr(plain).startswith("<Run of run: loss ")

    def close(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target).abs() < 1.0).float().mean()

    torch.manual_seed(0)
    ours = simulate(Line(), numbers(0), numbers(1), squared_error, metric=close, **REGRESSION, out=tmp_path)
    assert ours.path != plain.path, "the metric is in the hash"
    assert ours.measure == "close"
    assert ours.final["metric.close_mean"] > ours.nodes["metric.close"][0, 0] + 0.1
    assert ours.certificate["metrics"] == {"close": True}
    assert np.array_equal(ours.models, plain.models)


def test_result_gives_node_models_with_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Line()
    result = simulate(net, numbers(0), numbers(1), squared_error, **REGRESSION, out=tmp_path)
    x, y = (torch.from_numpy(a).float() for a in numbers(1))
    for node in range(7):
        model = result.model(node)
        assert not model.training
        assert squared_error(model(x), y).item() == pytest.approx(
            result.nodes["metric.loss"][-1, node], rel=1e-4
        )
    state = result.state_dict(3)
    assert state.keys() == net.state_dict().keys()
    assert not torch.equal(state["norm.running_mean"], net.state_dict()["norm.running_mean"])
    assert result.path is not None
    loaded = rpel.load(result.path, model=Line())
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict(3).items())
    with pytest.raises(ValueError, match=r"rpel\.load"):
        rpel.load(result.path).model(0)
    with pytest.raises(ValueError, match=r"7.* 0 to 6"):
        result.model(7)


def test_uniform_output_keeps_local_state_and_reports_both_accuracies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    fields = OWN | {"output": "uniform", "checkpoint_every": 3, "lr": 0.02, "rounds": 40, "eval_every": 10}
    result = simulate(net, blobs(0), blobs(1), **fields, out=tmp_path)
    x, y = (torch.from_numpy(a) for a in blobs(1))
    stored = [(result.model(node)(x).argmax(1) == y).double().mean().item() for node in range(7)]
    assert result.final["output_accuracy_mean"] == pytest.approx(np.mean(stored), rel=1e-4)
    assert result.final["output_accuracy_worst"] == pytest.approx(min(stored), rel=1e-4)
    assert result.final["accuracy_mean"] == pytest.approx(result.nodes["accuracy"][-1].mean())
    assert result.final["accuracy_mean"] != pytest.approx(np.mean(stored), rel=1e-4)
    assert all(row["output_accuracy_mean"] is None for row in result.history.rows()[:-1])
    crashed = tmp_path / "crashed"
    with pytest.raises(CrashError):
        simulate(net, blobs(0), blobs(1), **fields, out=crashed, progress=crash_after(5))
    again = simulate(net, blobs(0), blobs(1), **fields, out=crashed)
    assert again.final["output_accuracy_worst"] == result.final["output_accuracy_worst"]
    assert result.state_dict(3).keys() == again.state_dict(3).keys()
    assert all(torch.equal(value, again.state_dict(3)[key]) for key, value in result.state_dict(3).items())


def test_every_honest_node_may_bring_separate_data(tmp_path: Path) -> None:
    x, y = blobs(0, 210)
    parts = [(x[i::7], y[i::7]) for i in range(7)]
    dataset_of = [torch.utils.data.TensorDataset(torch.from_numpy(a), torch.from_numpy(b)) for a, b in parts]
    loaders = [torch.utils.data.DataLoader(one, batch_size=3) for one in dataset_of]
    results = [
        simulate(fixed_net(), train, blobs(1), **OWN, reuse=True, out=tmp_path)
        for train in (parts, dataset_of, loaders)
    ]
    assert len({result.path for result in results}) == 1
    assert results[0].accuracy_mean > 0.7
    assert results[0].spec.partition == "own"
    other = simulate(fixed_net(), [parts[6], *parts[:6]], blobs(1), **OWN, out=tmp_path)
    assert other.path != results[0].path
    # one class each: nobody learns all three alone
    alone = [(x[y == i % 3], y[y == i % 3]) for i in range(7)]
    apart = simulate(fixed_net(), alone, blobs(1), **{**OWN, "rounds": 1, "lr": 0.01}, out=None)
    gradients = apart.models - np.concatenate([p.detach().numpy().ravel() for p in fixed_net().parameters()])
    assert np.abs(gradients).max() > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train": [blobs(0)] * 3}, "3 data sets, but there are 7 honest nodes"),
        ({"train": iter([1, 2])}, "train is a .* cannot be read"),
        ({"train": numbers(0), "test": numbers(1)}, "float targets need a model= and a loss="),
        (
            {"train": numbers(0), "test": numbers(1), "loss": squared_error},
            "partition 'dirichlet'.*partition='iid'",
        ),
        (
            {
                "train": numbers(0),
                "test": numbers(1),
                "loss": squared_error,
                "partition": "iid",
                "attack": "label_flip",
            },
            "works on classes",
        ),
        (
            {"train": numbers(0), "test": blobs(1), "loss": squared_error, "partition": "iid"},
            r"train targets have the shape \(1,\) and test targets \(\)",
        ),
    ],
)
def test_user_data_that_do_not_fit_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        simulate(fixed_net(), **{"test": blobs(1), **OWN, **arguments}, out=None)
    assert "\n" not in str(caught.value)


def test_progress_is_printed_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    tiny(None, progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("run, seed 0: round 6 of 6; accuracy in round 6: mean 0.")
    tiny(None, progress=False)
    assert capsys.readouterr().err == ""


def test_pandas_gets_all_rounds_of_all_seeds(finished: Result) -> None:
    pytest.importorskip("pandas")
    both = rpel.RunSet([finished, rpel.Run(finished.spec.replace(seed=1), history=finished.history)])
    frame = both.to_pandas()
    assert list(frame.columns) == ["seed", *finished.history.columns]
    assert frame["seed"].tolist() == [0] * TINY["rounds"] + [1] * TINY["rounds"]
    np.testing.assert_array_equal(frame["loss"], np.tile(finished.history["loss"], 2))
    assert frame.groupby("seed")["accuracy_mean"].count().tolist() == [len(finished.evaluated)] * 2


def test_table_without_pandas_says_what_to_install(finished: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpel.runs.table.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'rpel\[pandas\]'"):
        finished.history.to_pandas()


def _pixels(part: tuple[Any, Any], kind: type) -> tuple[Any, Any]:
    return np.clip(40 * np.asarray(part[0]) + 100, 0, 255).astype(kind), part[1]


def _broken(part: tuple[Any, Any], value: float) -> tuple[Any, Any]:
    x = np.array(part[0])
    x[[3, 7], 1] = value
    return x, part[1]


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (
            _pixels(blobs(0), np.uint8),
            blobs(1),
            r"train examples are uint8 from \d+ to \d+, the test .* float32 from",
        ),
        (blobs(0), _pixels(blobs(1), np.uint8), r"train examples are float32 .* test examples are uint8"),
        (
            [blobs(0)] * 6 + [_pixels(blobs(0), np.uint8)],
            blobs(1),
            r"train\[0\] .* float32 .* train\[6\] .* uint8",
        ),
        (_broken(blobs(0), np.nan), blobs(1), r"train examples have NaN or infinity in 2 of \d+ rows: 3, 7"),
        (blobs(0), _broken(blobs(1), np.inf), r"test examples have NaN or infinity in 2 of \d+ rows: 3, 7"),
        (blobs(0), (np.asarray(blobs(1)[0])[:, :1], blobs(1)[1]), "train examples have the shape"),
    ],
    ids=["pixels and numbers", "numbers and pixels", "a node with pixels", "nan", "infinity", "shape"],
)
def test_data_on_two_scales_or_with_broken_numbers_are_refused_with_ranges_and_rows(
    train: Any, test: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        simulate(fixed_net(), train, test, **OWN, out=None)
    assert "\n" not in str(caught.value)


def test_half_a_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.*test"):
        simulate(train=blobs(0), out=None)


def test_several_seeds_are_several_runs_with_intervals(tmp_path: Path) -> None:
    result = tiny(tmp_path, seeds="0-2")
    assert isinstance(result, Results)
    assert [run.spec.seed for run in result.runs] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3
    mean, low, high = result.interval("accuracy_mean")
    assert low < mean < high
    assert mean == pytest.approx(np.mean([run.accuracy_mean for run in result.runs]))
    assert result.history["accuracy_mean_low"][-1] == pytest.approx(low)
    assert result.accuracy_mean == pytest.approx(mean)
    assert result.models.shape == (3, 7, 7850)
    assert result.certificate["held"]
    assert len(result.plot().axes[0].lines) == 3
    assert result.summary()["intervals"]["accuracy_mean"] == {"mean": mean, "low": low, "high": high}
    alone = tiny(tmp_path, seed=1)
    assert alone.reused


# --- certificate, faults, methods ---------------------------------------------------------------------------


def test_violation_is_reported_with_node_and_round(tmp_path: Path) -> None:
    result = tiny(tmp_path, nodes=20, byzantine=6, pull=6, b_hat=1, confidence=0.01, rounds=3)
    proof = result.certificate
    assert not proof["held"]
    assert proof["max_observed"] > 1
    assert proof["plan"]["probability"] < 0.01
    assert result.path is not None
    arrays = np.load(result.path / "counts.npz")
    listed = {(v["round"], v["node"], v["count"]) for v in proof["violations"]}
    rows, columns = np.nonzero(arrays["counts"] > 1)
    met = arrays["counts"][rows, columns]
    assert listed == set(zip((rows + 1).tolist(), arrays["ids"][columns].tolist(), met.tolist(), strict=True))
    assert proof["violations_total"] == len(listed)


def test_huge_numbers_are_written_as_they_are_while_they_are_finite(tmp_path: Path) -> None:
    result = tiny(tmp_path, rule="mean", attack="foe", attack_params={"zeta": 1e30}, rounds=4)
    assert result.path is not None

    def refuse(word: str) -> None:
        raise AssertionError(word)

    rows = [
        json.loads(line, parse_constant=refuse)
        for line in (result.path / "metrics.jsonl").read_text().splitlines()
    ]
    missing = {key for key, value in rows[-1].items() if value is None}
    outputs = {"output_accuracy_mean", "output_accuracy_worst"}  # the models kept are those of the last round
    # there is no backdoor and no privacy here
    others = {"attack_success_mean", "attack_success_worst", "epsilon"}
    assert missing == {*others, *outputs}


def test_threads_are_pinned_recorded_and_given_back() -> None:
    from rpel.backend.pool import threads

    before = threads(), torch.get_num_threads()
    assert tiny(None, threads=1).certificate["threads"] == 1
    assert (threads(), torch.get_num_threads()) == before


def test_missing_result_files_are_named() -> None:
    with pytest.raises(ValueError, match="partition 'writer'"):
        tiny(None, partition="writer")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"'cuda'.*CPU-only.*'cpu'"):
            tiny(None, device="cuda")
    with pytest.raises(ValueError, match=r"rpel\.simulate"):
        runs.run(Spec(dataset="own"), Objects())


def test_ctrl_c_in_the_last_round_of_a_seed_stops_before_the_next(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def interrupt(tick: Tick) -> None:
        seen.append((tick.seed, tick.round))
        if tick.round == tick.rounds:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        simulate(
            "linear",
            nodes=6,
            byzantine=1,
            rounds=2,
            eval_size=50,
            seeds="0,1",
            out=tmp_path,
            progress=interrupt,
        )
    assert seen == [(0, 1), (0, 2)]
    assert len(list(tmp_path.glob("*/certificate.json"))) == 1


def test_backdoor_succeeds_less_with_a_robust_rule_than_with_averaging() -> None:
    shared: dict[str, Any] = {
        "dataset": "mnist-sample-8x8", "nodes": 12, "byzantine": 3, "pull": 8, "b_hat": 3, "rounds": 30,
        "lr": 0.5, "partition": "iid", "attack": "backdoor", "attack_params": {"target": 7}, "eval_every": 30,
        "out": None,
    }  # fmt: skip
    mean, robust, clean = (
        simulate("linear", **{**shared, **other})
        for other in ({"rule": "mean"}, {}, {"attack": "alie", "attack_params": {}})
    )
    worst, least = mean.final["attack_success_worst"], robust.final["attack_success_mean"]
    assert 0 <= robust.final["attack_success_mean"] <= robust.final["attack_success_worst"] <= 1
    assert worst > 0.5 > least
    assert mean.history.rows()[0]["attack_success_mean"] is None
    assert clean.final["attack_success_worst"] is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"share": 0}, "a share above 0"),
        ({"target": -1}, "the number of a class"),
        ({"size": 3}, "knows no parameter"),
    ],
)
def test_parameters_that_no_backdoor_has_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        simulate("linear", attack="backdoor", attack_params=wrong, out=None)
