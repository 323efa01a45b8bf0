"""The public functions of the simulator: simulate, resume."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from rpel.config.spec import DatasetName, MethodName, Spec
from rpel.simulation.inputs import Download, Loss, Objects
from rpel.simulation.result import Result
from rpel.simulation.run import Interrupted, Progress, Tick
from rpel.simulation.run import resume as _resume
from rpel.simulation.run import run as _run
from rpel.types import Scale

__all__ = ["Interrupted", "Tick", "resume", "simulate"]


def simulate(
    model: str | nn.Module | None = None,
    train: Any = None,
    test: Any = None,
    loss: Loss | None = None,
    *,
    dataset: DatasetName = "mnist-sample",
    data_dir: str | Path | None = None,
    nodes: int = 20,
    byzantine: int = 4,
    pull: int | Literal["plan"] | None = None,
    b_hat: int | Literal["plan"] | None = None,
    confidence: float = 0.99,
    rounds: int = 60,
    method: MethodName = "rpel",
    rule: str | None = None,
    graph: Literal["random", "honest-first"] = "random",
    placement: Literal["random", "adversarial"] = "random",
    attack: str = "alie",
    attack_params: Mapping[str, Any] | str = {},
    partition: Literal["dirichlet", "iid", "writer", "virtual"] = "dirichlet",
    alpha: float = 1.0,
    lr: float | str | Sequence[tuple[int, float]] = 0.5,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    batch_size: int = 25,
    local_steps: int = 1,
    output: Literal["last", "uniform"] = "last",
    no_show: float = 0.0,
    silent: bool = False,
    roaming: bool = False,
    consistent: bool = False,
    seed: int = 0,
    seeds: str | Sequence[int] | None = None,
    eval_every: int = 20,
    eval_size: int = 1000,
    checkpoint_every: int = 20,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    out: str | Path | None = "runs",
    name: str = "run",
    scale: Scale | Literal["smoke", "short", "full"] = Scale.FULL,
    progress: Progress | None = None,
    force: bool = False,
    tensorboard: bool = False,
) -> Result:
    """Run Algorithm 1 among simulated nodes, some of them hostile, and return what it shows.

    What is trained:
        model: a name, the paper's notation, or any torch.nn.Module, whose values are the common initial model.
        train, test: torch data sets or pairs of arrays (examples, labels); left out: ``dataset`` from ``data_dir``.
        loss: loss(output, target); cross-entropy if left out.
        partition, alpha: how the training examples are shared out among the nodes.
    Who takes part:
        nodes, byzantine: n and b. pull, b_hat: peers pulled a round and hostile answers survived; planned if left out
        so that the plan holds with ``confidence`` over all nodes and ``rounds``.
        method, rule, graph, placement: how models are exchanged and aggregated.
        attack, attack_params, consistent, silent, roaming: what hostile nodes do. no_show: how often others are late.
    How it is trained:
        lr (a rate, or pairs (up to round, rate)), momentum, weight_decay, batch_size, local_steps, output.
    How it is run:
        seed: where all randomness comes from. seeds: several runs, such as "0-4"; the result is then a Results.
        eval_every, eval_size: rounds between evaluations and their test examples (the last round takes all).
        out, name: the folder for run folders and the first part of the run folder's name; out=None keeps nothing.
        checkpoint_every, force: rounds between checkpoints; force=True begins anew a run that is there.
        device, threads, scale: where it runs, and how large it is beside what it stands for.
        progress: called after every round with a Tick. tensorboard: copy the metrics for TensorBoard.

    Returns a :class:`Result`: history (a table with a row a round), models (h, d), certificate, path, plot().
    Raises ValueError, one sentence that names the value and what would be right, for anything that does not fit.

    >>> result = simulate("linear", nodes=6, byzantine=1, rounds=2, eval_size=100, out=None)
    >>> len(result.history), result.certificate["held"], result.models.shape
    (2, True, (5, 7850))
    """
    given = {key: value for key, value in locals().items() if key in Spec.model_fields and key not in ("model", "out")}
    own = Objects(model if isinstance(model, nn.Module) else None, train, test, loss)
    if isinstance(model, str):
        given["model"] = model
    if data_dir is not None:
        given["data_dir"] = str(data_dir)
    if out is not None:
        given["out"] = str(out)
    if tensorboard and out is None:
        raise ValueError("tensorboard=True needs a run folder to write to: give out='runs' instead of out=None")
    return _run(Spec(**given), own, keep=out is not None, progress=progress, force=force, tensorboard=tensorboard)


def resume(
    path: str | Path,
    model: nn.Module | None = None,
    train: Any = None,
    test: Any = None,
    loss: Loss | None = None,
    *,
    progress: Progress | None = None,
    download: Download | None = None,
    tensorboard: bool = False,
) -> Result:
    """Go on with a run from its last checkpoint, bit by bit as if it had not stopped; a finished one is returned.

    path: the run folder. model, train, test, loss: what the run was given from Python, which it needs again.
    progress, tensorboard: as in :func:`simulate`. download(name, done, total) is told of bytes that arrive.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = simulate("linear", nodes=6, byzantine=1, rounds=2, eval_size=100, out=folder)
    ...     resume(first.path).reused
    True
    """
    own = Objects(model, train, test, loss)
    return _resume(Path(path), own, progress=progress, download=download, tensorboard=tensorboard)
