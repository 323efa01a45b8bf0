"""What a run is, as one frozen record: its fields, their defaults, TOML in and out. `Training` is the
part that a network of peers shares: how each node trains.

Invariants: TOML, command line and Python go through the same checks; nothing here imports torch or numba.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import BeforeValidator, Field, field_validator, model_validator

from rpel import component
from rpel.errors import nearest
from rpel.record import (
    PAIRED,
    CheckedRecord,
    Identity,
    NamedRate,
    choices,
    joined,
    learning_rate,
    parameters,
    parse_seeds,
    planned,
    read_toml,
    unbounded,
)
from rpel.types import CONFIDENCE, WireName

DatasetName = Literal[
    "mnist-sample", "mnist", "fashion-mnist", "cifar10", "femnist", "heart-disease", "fdu-mtl", "shakespeare",
    "mnist-8x8", "mnist-sample-8x8", "own",
]  # fmt: skip
MethodName = Literal[
    "rpel", "all-to-all", "nna", "cs-plus", "gts", "gts-exact", "clipped-gossip", "clipped-gossip-oracle",
    "rtc", "ios", "balance", "d-psgd", "el-local", "el-oracle",
]  # fmt: skip
TO_ALL = ("all-to-all", "nna")
"""The methods in which everybody hears everybody: they have no pull and no b_hat of their own."""

Pieces = tuple[tuple[int, float], ...]
"""A learning-rate schedule: (up to and including this round, this rate), …;
the last rate holds from then on."""

Alpha = Annotated[Annotated[float, Field(gt=0)] | Literal["inf"], BeforeValidator(unbounded)]
"""Of a Dirichlet distribution; "inf" stays a word, so that it means the same in TOML,
JSON and a run's hash."""

Rate = Annotated[float | Pieces | str, BeforeValidator(learning_rate)]

Parameters = Annotated[dict[str, Any], BeforeValidator(parameters)]
Planned = Annotated[int | None, BeforeValidator(planned)]


class Training(CheckedRecord):
    """How each node trains between two exchanges, how it aggregates, and how often it is evaluated.

    >>> Training(lr=[[500, 0.5], [1000, 0.1]]).rate(501)
    0.1
    >>> Training(momentun=0.9)
    Traceback (most recent call last):
    ValueError: there is no field 'momentun'; the nearest is 'momentum'
    """

    model: str = Field(
        "mnist", description="network: mnist, cifar10, femnist, mlp, linear, or the paper's notation"
    )
    rule: str | None = Field(None, description="aggregation, such as mean or nnm+median")
    partition: Literal["dirichlet", "iid", "writer", "owner", "virtual", "own"] = Field(
        "dirichlet", description="who holds which data"
    )
    alpha: Alpha = Field(
        1.0,
        description="how alike the nodes' data are; small is unlike, inf is alike",
        examples=["a number such as 1.0, or inf"],
    )
    lr: Rate = Field(
        0.5,
        description="learning rate, or a schedule: 500:0.5,1000:0.1 (up to round:rate), cosine(0.5, "
        "warmup=10); momentum averages gradients, so 1.0 here steps as far as 0.1 in torch.optim.SGD with "
        "momentum 0.9",
        examples=[
            "0.5, 500:0.5,1000:0.1 with rising rounds and positive rates, cosine(0.5, warmup=10) or "
            "warmup(0.5, 10)"
        ],
    )
    momentum: float = Field(0.9, description="momentum, beta", ge=0, lt=1)
    weight_decay: float = Field(1e-4, description="L2 regularisation, applied after momentum", ge=0)
    batch_size: int = Field(25, description="examples per local step", ge=1)
    local_steps: int = Field(1, description="local steps per round", ge=1)
    optimizer: Annotated[Literal["momentum", "sgd", "adam", "adamw", "own"], Identity.LATER] = Field(
        "momentum", description="the local step: the paper's momentum, or torch's of that name"
    )
    optimizer_params: Annotated[Parameters, Identity.LATER] = Field(
        {},
        description="its parameters, such as eps=1e-6 (sgd, adam, adamw)",
        examples=['eps=1e-6 or JSON such as {"eps": 1e-6}'],
    )
    eval_every: int = Field(20, description="rounds between evaluations", ge=1)
    eval_size: int = Field(250, description="test examples of an evaluation (the last round takes all)", ge=1)

    def __init__(self, **fields: Any) -> None:  # for type checkers: values come as people write them
        super().__init__(**fields)

    @model_validator(mode="after")
    def _named_rate(self) -> Self:
        if isinstance(self.lr, str) and "rounds" not in type(self).model_fields:
            raise ValueError(
                f"lr {self.lr!r} needs the number of rounds: here the nearest is a rate, or round:rate pairs"
            )
        return self

    @model_validator(mode="after")
    def _fitting_parameters(self) -> Self:
        """Parameters of something that was not chosen would be left out without a word."""
        if self.optimizer == "momentum" and self.optimizer_params:
            raise ValueError(
                "optimizer_params go with optimizer sgd, adam or adamw: for momentum, --momentum is its only "
                "one"
            )
        return self

    def rate(self, t: int) -> float:
        """The learning rate of round t = 1, 2, …

        >>> [Training(lr="500:0.5,1000:0.1").rate(t) for t in (1, 500, 501, 2000)]
        [0.5, 0.5, 0.1, 0.1]
        """
        if isinstance(self.lr, float):
            return self.lr
        if isinstance(self.lr, str):
            return NamedRate.read(self.lr).at(t, getattr(self, "rounds", 0))
        return next((rate for last, rate in self.lr if t <= last), self.lr[-1][1])


class Spec(Training):
    """Everything that defines a run. Fields left out have the defaults below;
    pull and b_hat are then planned.

    >>> Spec(nodes=30, byzantine=6, attack="alie").rounds
    60
    >>> Spec(nods=30)
    Traceback (most recent call last):
    ValueError: there is no field 'nods'; the nearest is 'nodes'
    """

    name: Annotated[str, Identity.NEVER] = Field(
        "run",
        description="first part of the run folder's name",
        pattern=r"^[\w.+-]+$",
        examples=["letters, digits and . + - _"],
    )
    dataset: DatasetName | str = Field(
        "mnist-sample", description="data set: a name, or module:function of yours"
    )
    data_dir: Annotated[str | None, Identity.NEVER] = Field(
        None, description="folder with the data sets (else RPEL_DATA, the cache, a download)"
    )
    nodes: int = Field(20, description="all nodes, n", ge=2)
    byzantine: int = Field(4, description="how many of them are hostile, b", ge=0)
    pull: Planned = Field(
        None,
        description="peers pulled per node and round, s",
        ge=1,
        examples=["a whole number from 1 on, or plan"],
    )
    b_hat: Planned = Field(
        None,
        description="hostile answers that a round survives",
        ge=0,
        examples=["a whole number from 0 on, or plan"],
    )
    confidence: float = Field(
        CONFIDENCE, description="probability of the plan, over all nodes and rounds", gt=0, lt=1
    )
    rounds: int = Field(60, description="rounds, T", ge=1)
    method: MethodName = Field("rpel", description="how nodes exchange models")
    graph: Literal["random", "honest-first"] = Field("random", description="how a fixed graph is built")
    placement: Literal["random", "adversarial"] = Field(
        "random", description="where hostile nodes sit on a graph"
    )
    attack: str = Field("alie", description="what hostile nodes send")
    attack_params: Parameters = Field(
        {},
        description="its parameters, such as z=1.5 or targeting=most-exposed",
        examples=['z=1.5 or JSON such as {"z": 1.5}'],
    )
    outer: Annotated[Literal["none", "nesterov"], Identity.LATER] = Field(
        "none", description="a step after the aggregation, for many local steps"
    )
    outer_lr: Annotated[float, Identity.LATER] = Field(0.7, description="its rate", gt=0)
    outer_momentum: Annotated[float, Identity.LATER] = Field(0.9, description="its momentum", ge=0, lt=1)
    output: Literal["last", "uniform"] = Field(
        "last", description="the model kept: of the last round, or of a drawn one"
    )
    no_show: float = Field(
        0.0, description="probability that an honest node misses a round's deadline", ge=0, lt=1
    )
    silent: bool = Field(False, description="hostile nodes do not answer")
    consistent: Annotated[bool, Identity.LATER] = Field(
        False, description="each hostile node sends the same vector to all who pull it"
    )
    wire: Annotated[WireName, Identity.LATER] = Field("float32", description="what a pulled model is made of")
    asynchronous: Annotated[bool, Identity.LATER] = Field(
        False, description="nodes publish, pull and aggregate without waiting for each other"
    )
    speeds: Annotated[str, Identity.LATER, BeforeValidator(joined)] = Field(
        "equal",
        description="how slow nodes are: equal, lognormal:0.3, stragglers:0.1,10, joined by +, or a list",
    )
    jitter: Annotated[float, Identity.LATER] = Field(
        0.0, description="how unequal a node's local phases are: sigma of a lognormal factor", ge=0
    )
    latency: Annotated[float, Identity.LATER] = Field(
        0.1, description="the way of a message, in units of the median local phase", gt=0
    )
    max_grad_norm: Annotated[float | None, Identity.LATER] = Field(
        None, description="gradients of single examples are clipped to this norm", gt=0
    )
    noise_multiplier: Annotated[float | None, Identity.LATER] = Field(
        None, description="Gaussian noise on their sum, in multiples of max_grad_norm", ge=0
    )
    target_epsilon: Annotated[float | None, Identity.LATER] = Field(
        None, description="plan the noise for this epsilon, or stop before it is passed", gt=0
    )
    target_delta: Annotated[float | None, Identity.LATER] = Field(
        None, description="delta of epsilon, below one over a node's examples", gt=0, lt=1
    )
    seed: Annotated[int, PAIRED] = Field(0, description="where all randomness comes from", ge=0)
    seeds: Annotated[str | None, Identity.NEVER] = Field(
        None,
        description="several runs, such as 0-4 or 0,1,7; with intervals",
    )
    checkpoint_every: Annotated[int, Identity.NEVER] = Field(
        20, description="rounds between checkpoints; 0: only when interrupted", ge=0
    )
    backend: Annotated[Literal["auto", "numba", "torch"], Identity.LATER] = Field(
        "auto",
        description="what computes: numba (CPU) or torch (any device); auto: numba on the CPU, else torch",
    )
    device: Annotated[str, Identity.LATER] = Field(
        "cpu",
        description="where models and data live: cpu, cuda, cuda:1, mps",
        pattern=r"^(cpu|cuda(:\d+)?|mps)$",
        examples=["cpu, cuda, cuda:1 (the second of several) or mps"],
    )
    threads: Annotated[int | None, Identity.NEVER] = Field(
        None, description="threads (unset: as many as cores)", ge=1
    )
    workers: Annotated[int, Identity.NEVER] = Field(1, description="processes that share the run", ge=1)
    out: Annotated[str, Identity.NEVER] = Field("runs", description="folder for run folders")

    def __init__(self, **fields: Any) -> None:  # for type checkers: values come as people write them
        super().__init__(**fields)

    def replace(self, **changes: Any) -> "Spec":
        """The same with some fields changed, checked again; a plan that it followed is left behind. Who turns
        to a method in which everybody hears everybody also leaves the pull and b_hat of the other method.

        >>> Spec(pull=5).replace(batch_size=50).pull, Spec(pull=5).replace(method="nna").pull
        (5, None)
        """
        if changes.get("method") in TO_ALL and self.method not in TO_ALL:
            changes = {"pull": None, "b_hat": None, **changes}
        return Spec(**{**self.model_dump(exclude_unset=True), **changes})

    @model_validator(mode="after")
    def _fit(self) -> Self:
        """Parameters of something that was not chosen would be left out without a word."""
        given = self.model_fields_set
        changed = [
            key
            for key in ("outer_lr", "outer_momentum")
            if getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.outer == "none" and changed and given:
            raise ValueError(
                f"{changed[0]} {getattr(self, changed[0])} goes with outer nesterov, not with outer none"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """The fields that make this what it is: of the backend where it is not numba,
        of the device its class.

        >>> sorted(Spec(device="cuda:1", backend="torch").identity().items())[4:8:3]
        [('backend', 'torch'), ('confidence', 0.99)]
        """
        values = super().identity()
        if values.get("backend") == "numba":
            del values["backend"]
        if "device" in values:
            values["device"] = self.device.partition(":")[0]
        return values

    @model_validator(mode="after")
    def _minority(self) -> Self:
        if 2 * self.byzantine >= self.nodes:
            most = (self.nodes - 1) // 2
            raise ValueError(
                f"byzantine {self.byzantine} is not a minority of nodes {self.nodes}: the most is {most}"
            )
        return self

    @model_validator(mode="after")
    def _known_dataset(self) -> Self:
        ours, theirs = get_args(DatasetName), component.registered("rpel.datasets")
        if self.dataset not in ours and self.dataset not in theirs and not component.is_own(self.dataset):
            known = [*choices(DatasetName), *theirs]
            raise ValueError(f"dataset {self.dataset!r} is unknown: {nearest(self.dataset, known)}")
        return self

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError(
                f"seeds {value} is one number: give seed={value} for that seed, seeds=[{value}] for a Runs "
                f"with that seed alone, or seeds=range({value}) for that many seeds"
            )
        if isinstance(value, list | tuple | range):
            value = ",".join(map(str, value))
        value = None if value is None else str(value)
        try:
            parse_seeds(value)
        except ValueError:
            raise ValueError(f"seeds {value!r} is not valid: it takes 0-4 or 0,1,7, each seed once") from None
        return value


def compared_fields() -> list[str]:
    """The fields in which two settings can differ, by their metadata and nothing else.

    >>> [key for key in ("rule", "seed", "threads") if key in compared_fields()]
    ['rule']
    """
    marks = {key: field.metadata for key, field in Spec.model_fields.items()}
    return [key for key, mark in marks.items() if Identity.NEVER not in mark and PAIRED not in mark]


def spec_hash(spec: Spec, data: Mapping[str, str], own: Mapping[str, str] | None = None) -> str:
    """Twelve hexadecimal digits that name this run: its meaning, its data,
    and the user's own objects if there are any.

    The Spec has nothing left open: it was resolved, or comes from a run folder. Equal hashes mean equal
    results: every field that can change a file of the run is in the hash, with the checksums of the data.

    >>> a, b = Spec(threads=1, out="here"), Spec(threads=2, out="there")
    >>> spec_hash(a, {}) == spec_hash(b, {}), spec_hash(a, {}) == spec_hash(a.replace(seed=1), {})
    (True, False)
    """
    meaning = spec.identity()
    if isinstance(spec.lr, float):
        meaning["lr"] = [[spec.rounds, spec.lr]]
    content = json.dumps([meaning, dict(data), dict(own or {})], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:12]


# --- TOML ---------------------------------------------------------------------------------------------------


def presets() -> list[str]:
    """The names of the presets."""
    return sorted(p.name.removesuffix(".toml") for p in _shelf().iterdir() if p.name.endswith(".toml"))


def _shelf() -> Any:
    return resources.files("rpel") / "presets"


def load(source: str | Path) -> Spec:
    """The Spec of a preset's name, a TOML file, or a run folder.

    >>> load("mnist-100").b_hat
    7
    >>> load("mnist-10")
    Traceback (most recent call last):
    ValueError: there is no preset and no file 'mnist-10'; the nearest is 'mnist-100'
    """
    if str(source) in presets():
        return _made(
            tomllib.loads((_shelf() / f"{source}.toml").read_text("utf-8")), str(source), str(source)
        )
    path = Path(source)
    if path.is_dir():
        return load_folder(path)
    if not path.is_file():
        raise ValueError(f"there is no preset and no file {str(source)!r}; {nearest(path.stem, presets())}")
    return _made(read_toml(path), path.stem, str(path))


def load_folder(path: Path) -> Spec:
    """The Spec of a run folder."""
    file = path / "spec.toml"
    if not path.exists():
        raise ValueError(f"there is no run folder {str(path)!r}")
    if not file.is_file():
        raise ValueError(f"{str(path)!r} is not a run folder: it holds no spec.toml")
    return _made(read_toml(file), path.name, str(file), run_folder=True)


def _made(content: dict[str, Any], name: str, where: str, run_folder: bool = False) -> Spec:
    fields = {"name": name, **content}
    if not run_folder and "preset" in fields:
        base = fields.pop("preset")
        if base not in presets():
            raise ValueError(f"{where}: there is no preset {base!r}; {nearest(str(base), presets())}")
        return load(base).replace(**fields)
    return Spec(**fields)


def to_toml(spec: Spec) -> str:
    """All fields as TOML that :func:`load` reads back, each with its meaning; unset ones stand as comments.

    >>> print(to_toml(Spec(byzantine=3))[:60])
    name = "run"                      # first part of the run fo
    """
    lines = []
    own_first = sorted(Spec.model_fields.items(), key=lambda item: item[0] in Training.model_fields)
    for key, field in own_first:
        value = getattr(spec, key)
        text = f"# {key} =" if value is None else f"{key} = {_toml_value(value)}"
        hint = " (planned)" if value is None and key in ("pull", "b_hat") else ""
        lines.append(f"{text:<33} # {field.description}{hint}".rstrip())
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(tomli_w.dumps({key: item}).strip() for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return tomli_w.dumps({"k": value}).strip().removeprefix("k = ")
