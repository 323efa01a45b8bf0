"""What a run is: its fields, their defaults, presets, TOML in and out, and the hash of its meaning.

A `Spec` is everything that determines numbers, an `Execution` everything that does not; a `Request` is
both, as a TOML file or a command line has them. `Training` is the part that a network of peers shares.

Invariants: TOML, command line and Python go through the same checks; a field that takes a component holds its
text in one spelling; nothing here imports torch or numba.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rpel.component import Component, is_own, parse, parse_chain, parse_value, registered
from rpel.errors import nearest, unknown
from rpel.record import OWN, CheckedRecord, parse_seeds, read_toml
from rpel.types import CONFIDENCE, WireName

DATASETS = (
    "mnist-sample", "mnist", "fashion-mnist", "cifar10", "femnist", "heart-disease", "fdu-mtl", "shakespeare",
    "mnist-8x8", "mnist-sample-8x8",
)  # fmt: skip
TO_ALL = ("all-to-all", "nna")
"""The methods in which everybody hears everybody: they have no pull and no b_hat of their own."""
_ON_GRAPH = ("graph", "placement")


# --- components ---------------------------------------------------------------------------------------------


class Choice(CheckedRecord):
    """One of the components that a field takes, with its parameters.

    ``takes`` has the names, and of each the parameters, in the order of values without a name.
    """

    takes: ClassVar[Mapping[str, Sequence[str]]]
    name: str

    @classmethod
    def of(cls, text: str) -> Self:
        """Read it; ValueError, one sentence, where it is none.

        >>> Timing.of("asynchronous(latency=0.3)").latency
        0.3
        >>> Outer.of("nesterow")
        Traceback (most recent call last):
        ValueError: unknown outer 'nesterow'; did you mean 'nesterov'?
        """
        made: Self = _read(cls, text)
        return made

    @classmethod
    def check(cls, text: str) -> str:
        """Return the text in its one spelling."""
        cls.of(text)
        return str(parse(text))


@cache
def _read(cls: type[Any], text: str) -> Any:
    part = parse(text)
    if part.name not in cls.takes:
        raise ValueError(
            unknown(cls.__name__.lower(), part.name, [name for name in cls.takes if name != OWN])
        )
    return cls(name=part.name, **part.bind(cls.takes[part.name]))


class Partition(Choice):
    """How the training examples are divided among the nodes; alpha is a Dirichlet distribution's."""

    takes: ClassVar = {
        "dirichlet": ["alpha"],
        "iid": [],
        "writer": [],
        "owner": [],
        "virtual": ["alpha"],
        OWN: [],
    }
    alpha: Annotated[float, BeforeValidator(float)] = Field(1.0, gt=0, allow_inf_nan=True)


class Method(Choice):
    """How nodes exchange models; on a fixed graph, how it is built and where hostile nodes sit."""

    takes: ClassVar = {
        "rpel": [], "all-to-all": [], "nna": [], "cs-plus": _ON_GRAPH, "gts": _ON_GRAPH,
        "gts-exact": _ON_GRAPH, "clipped-gossip": _ON_GRAPH, "clipped-gossip-oracle": _ON_GRAPH,
        "rtc": _ON_GRAPH, "ios": _ON_GRAPH, "balance": _ON_GRAPH, "d-psgd": _ON_GRAPH, "el-local": [],
        "el-oracle": [],
    }  # fmt: skip
    graph: Literal["random", "honest-first"] = "random"
    placement: Literal["random", "adversarial"] = "random"


class Outer(Choice):
    """A step after the aggregation, for many local steps."""

    takes: ClassVar = {"none": [], "nesterov": ["lr", "momentum"]}
    lr: float = Field(0.7, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)


class Timing(Choice):
    """When nodes publish and pull, in units of the median local phase.

    speeds: how slow nodes are: ``equal``, ``lognormal(sigma)``, ``stragglers(share, factor)``, joined by
    ``+``, or a list with a number for each node. jitter: how unequal a node's local phases are, sigma of a
    lognormal factor. latency: of a message.
    """

    takes: ClassVar = dict.fromkeys(("synchronous", "asynchronous"), ("speeds", "latency", "jitter"))
    speeds: str | tuple[float, ...] = "equal"
    latency: float = Field(0.1, gt=0)
    jitter: float = Field(0.0, ge=0)

    @property
    def asynchronous(self) -> bool:
        """Whether nodes do not wait for each other."""
        return self.name == "asynchronous"


class Privacy(Choice):
    """Differential privacy of local steps: each example's gradient is clipped, and noise is added to the sum.

    noise: in multiples of clip. epsilon: plan the noise for it, or stop before it is passed. delta: of
    epsilon, below one over a node's examples.
    """

    takes: ClassVar = {"none": [], "dp": ["clip", "noise", "epsilon", "delta"]}
    clip: float | None = Field(None, gt=0)
    noise: float | None = Field(None, ge=0)
    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)

    @property
    def noisy(self) -> bool:
        """Whether noise is asked for."""
        return self.epsilon is not None or bool(self.noise)

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.name == "dp" and self.clip is None:
            raise ValueError("dp needs its parameter 'clip', as in dp(clip=1, epsilon=8, delta=1e-5)")
        if self.epsilon is not None and self.noise == 0:
            raise ValueError("noise 0 keeps no epsilon: leave it out, and the noise is planned")
        if self.noisy and self.delta is None:
            raise ValueError("dp needs a delta below one over a node's examples, such as delta=1e-5")
        if self.delta is not None and not self.noisy:
            raise ValueError(f"delta {self.delta:g} needs epsilon or noise beside it")
        return self


_SCHEDULES = {"cosine": ("peak", "warmup", "to"), "warmup": ("peak", "warmup"), "steps": ()}


class Rate(CheckedRecord):
    """A learning rate: constant, in ``pieces`` (up to and including this round, this rate), or a schedule.

    cosine and warmup rise in equal steps to ``peak`` over the first ``warmup`` rounds; cosine then falls to
    ``to`` along half a cosine, as torch's CosineAnnealingLR does over the rounds that are left.

    >>> rate = Rate.of("cosine(0.4, warmup=2)")
    >>> [round(rate.at(t, rounds=6), 3) for t in range(1, 7)]
    [0.2, 0.4, 0.4, 0.341, 0.2, 0.059]
    >>> [Rate.of("steps(500:0.5, 1000:0.1)").at(t, 2000) for t in (1, 500, 501, 2000)]
    [0.5, 0.5, 0.1, 0.1]
    """

    name: str = "constant"
    peak: float = Field(0.5, gt=0)
    warmup: int = Field(0, ge=0)
    to: float = Field(0.0, ge=0)
    pieces: tuple[tuple[int, Annotated[float, Field(gt=0)]], ...] = ()

    def __init__(self, **fields: Any) -> None:  # for type checkers: values come as people write them
        super().__init__(**fields)

    @classmethod
    def of(cls, value: float | str) -> "Rate":
        """Read a number or the text of a schedule."""
        if isinstance(value, int | float):
            return cls(peak=value)
        part = parse(value)
        if part.name not in _SCHEDULES:
            raise ValueError(unknown("schedule", part.name, _SCHEDULES))
        if part.name == "steps":
            return cls(name="steps", pieces=part.args)
        return cls(name=part.name, **part.bind(_SCHEDULES[part.name]))

    @model_validator(mode="after")
    def _rising(self) -> Self:
        ends = [last for last, _ in self.pieces]
        if (self.name == "steps" and not ends) or any(last <= before for before, last in pairwise(ends)):
            raise ValueError("steps needs pairs round:rate whose rounds rise, as in steps(500:0.5, 1000:0.1)")
        return self

    def at(self, t: int, rounds: int) -> float:
        """Return the rate of round t = 1, 2, … of ``rounds``; the last piece holds from then on."""
        if self.pieces:
            return next((rate for last, rate in self.pieces if t <= last), self.pieces[-1][1])
        if t <= self.warmup:
            return self.peak * t / self.warmup
        if self.name != "cosine":
            return self.peak
        done = (t - 1 - self.warmup) / max(1, rounds - self.warmup)
        return self.to + (self.peak - self.to) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def steps(pieces: Sequence[Sequence[float]]) -> str:
    """Return the schedule with these pieces as text.

    >>> steps([[500, 0.5], [1000, 0.1]])
    'steps(500:0.5, 1000:0.1)'
    """
    return str(Component("steps", tuple((last, rate) for last, rate in pieces)))


def _rate(value: Any) -> float | str:
    """A number, or the text of a schedule, which may be given as pairs."""
    try:
        if isinstance(value, str):
            value = parse_value(value)
        if not isinstance(value, str | int | float):
            value = steps(value)
        Rate.of(value)
    except (TypeError, ValueError) as error:
        why = error if type(error) is ValueError else "pairs are needed"
        raise ValueError(f"lr is a rate, steps(500:0.5, 1000:0.1) or cosine(0.5, warmup=10): {why}") from None
    return str(parse(value)) if isinstance(value, str) else float(value)


def _optimizer(text: str) -> str:
    part = parse(text)
    names = ("momentum", "sgd", "adam", "adamw")
    if part.name not in (*names, OWN):
        raise ValueError(unknown("optimizer", part.name, names))
    if part.name == "momentum" and (part.args or part.keywords):
        raise ValueError("optimizer momentum takes no parameters: the field momentum is its only one")
    return str(part)


def _dataset(text: str) -> str:
    part = parse(text)
    theirs = registered("rpel.datasets")
    if part.name not in (*DATASETS, OWN, *theirs) and not is_own(part.name):
        raise ValueError(unknown("dataset", part.name, [*DATASETS, *theirs]))
    return str(part)


def _chain(text: str | None) -> str | None:
    return None if text is None else "+".join(map(str, parse_chain(text)))


def _nodes(value: Any) -> Any:
    """A number or a list of them, also as text."""
    return parse_value(value) if isinstance(value, str) and value.strip() else value


def _planned(value: Any) -> Any:
    return None if value == "plan" else value


def _seeds(value: Any) -> str | None:
    if isinstance(value, int):
        raise ValueError(
            f"seeds {value} is one number: give seed={value} for that seed, seeds=[{value}] for a Runs with "
            f"that seed alone, or seeds=range({value}) for that many seeds"
        )
    text = ",".join(map(str, value)) if isinstance(value, list | tuple | range) else value
    text = None if text is None else str(text)
    try:
        parse_seeds(text)
    except ValueError:
        raise ValueError(f"seeds {text!r} is not valid: it takes 0-4 or 0,1,7, each seed once") from None
    return text


Planned = Annotated[int | None, BeforeValidator(_planned)]


# --- fields -------------------------------------------------------------------------------------------------


class Training(CheckedRecord):
    """How each node trains between two exchanges, how it aggregates, and how often it is evaluated.

    >>> Training(lr=[[500, 0.5], [1000, 0.1]]).lr
    'steps(500:0.5, 1000:0.1)'
    >>> Training(momentun=0.9)
    Traceback (most recent call last):
    ValueError: unknown field 'momentun'; did you mean 'momentum'?
    """

    model: str = Field(
        "mnist",
        description="network: mnist, cifar10, femnist, mlp, linear, or the paper's notation, as in L(10)-S",
    )
    rule: Annotated[str | None, AfterValidator(_chain)] = Field(
        None, description="aggregation, such as mean, nnm+median or krum(neighbours=m-f-2)"
    )
    partition: Annotated[str, AfterValidator(Partition.check)] = Field(
        "dirichlet",
        description="who holds which data: dirichlet(alpha), where a small alpha makes nodes unlike and inf "
        "makes them alike, iid, writer, owner, or virtual(alpha), where nodes share examples",
    )
    lr: Annotated[float | str, BeforeValidator(_rate)] = Field(
        0.5,
        description="learning rate, or a schedule: steps(500:0.5, 1000:0.1), up to round:rate, or "
        "cosine(0.5, warmup=10); momentum averages gradients, so 1.0 here steps as far as 0.1 in "
        "torch.optim.SGD with momentum 0.9",
    )
    momentum: float = Field(0.9, description="momentum, beta", ge=0, lt=1)
    weight_decay: float = Field(1e-4, description="L2 regularisation, applied after momentum", ge=0)
    batch_size: int = Field(25, description="examples per local step", ge=1)
    local_steps: int = Field(1, description="local steps per round", ge=1)
    optimizer: Annotated[str, AfterValidator(_optimizer)] = Field(
        "momentum",
        description="the local step: momentum, the paper's, or torch's sgd, adam, adamw(eps=1e-6)",
    )
    eval_every: int = Field(20, description="rounds between evaluations", ge=1)
    eval_size: int = Field(250, description="test examples of an evaluation (the last round takes all)", ge=1)

    def __init__(self, **fields: Any) -> None:  # for type checkers: values come as people write them
        super().__init__(**fields)

    def rate(self, t: int, rounds: int | None = None) -> float:
        """Return the learning rate of round t = 1, 2, …; rounds: how many there are, where no field says so.

        >>> Spec(lr="steps(500:0.5, 1000:0.1)").rate(501)
        0.1
        """
        return Rate.of(self.lr).at(t, getattr(self, "rounds", 1) if rounds is None else rounds)


class Spec(Training):
    """Everything that determines a run's numbers.

    Fields left out have the defaults below; pull and b_hat are then planned.

    >>> Spec(nodes=30, byzantine=6, attack="alie(z=1.5)").rounds
    60
    >>> Spec(nods=30)
    Traceback (most recent call last):
    ValueError: unknown field 'nods'; did you mean 'nodes'?
    """

    dataset: Annotated[str, AfterValidator(_dataset)] = Field(
        "mnist-sample", description="data set: a name, or module:function of yours"
    )
    nodes: int = Field(20, description="all nodes, n", ge=2)
    byzantine: Annotated[Annotated[int, Field(ge=0)] | tuple[int, ...], BeforeValidator(_nodes)] = Field(
        4, description="how many of them are hostile, b; or a list of their numbers, as in [0, 3]",
        examples=["a whole number such as 4, or a list of node numbers"],
    )  # fmt: skip
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
    method: Annotated[str, AfterValidator(Method.check)] = Field(
        "rpel",
        description="how nodes exchange models; those on a fixed graph take graph=honest-first and "
        "placement=adversarial",
    )
    attack: Annotated[str, AfterValidator(lambda text: str(parse(text)))] = Field(
        "alie",
        description="what hostile nodes send, as in alie(z=1.5, targeting=most-exposed, consistent=true)",
    )
    weights: Literal["equal"] = Field("equal", description="how much each node's model counts")
    outer: Annotated[str, AfterValidator(Outer.check)] = Field(
        "none", description="a step after the aggregation, for many local steps: nesterov(0.7, momentum=0.9)"
    )
    output: Literal["last", "uniform"] = Field(
        "last", description="the model kept: of the last round, or of a drawn one"
    )
    no_show: float = Field(
        0.0, description="probability that an honest node misses a round's deadline", ge=0, lt=1
    )
    silent: bool = Field(False, description="hostile nodes do not answer")
    wire: WireName = Field("float32", description="what a pulled model is made of")
    timing: Annotated[str, AfterValidator(Timing.check)] = Field(
        "synchronous",
        description="when nodes exchange: synchronous, or asynchronous(speeds=lognormal(0.5)+stragglers(0.1, "
        "10), latency=0.1, jitter=0.2), in units of the median local phase",
    )
    privacy: Annotated[str, AfterValidator(Privacy.check)] = Field(
        "none",
        description="differential privacy: dp(clip=1, noise=1.1, delta=1e-5) or dp(clip=1, epsilon=8, "
        "delta=1e-5)",
    )
    seed: int = Field(0, description="where all randomness comes from", ge=0)
    backend: Literal["auto", "numba", "torch"] = Field(
        "auto",
        description="what computes: numba (CPU) or torch (any device); auto: numba on the CPU, else torch",
    )
    device: str = Field(
        "cpu",
        description="where models and data live: cpu, cuda, cuda:1, mps",
        pattern=r"^(cpu|cuda(:\d+)?|mps)$",
        examples=["cpu, cuda, cuda:1 (the second of several) or mps"],
    )
    native: bool = Field(True, description="hand-written convolutions, where they are faster than torch's")

    def __init__(self, **fields: Any) -> None:  # for type checkers: values come as people write them
        super().__init__(**fields)

    def replace(self, **changes: Any) -> Self:
        """Return the same Spec with some fields changed, checked again.

        A plan that the Spec came from is dropped. Changing to a method in which all nodes hear each other
        also drops the other method's pull and b_hat.

        >>> Spec(pull=5).replace(batch_size=50).pull, Spec(pull=5).replace(method="nna").pull
        (5, None)
        """
        if changes.get("method") in TO_ALL and self.method not in TO_ALL:
            changes = {"pull": None, "b_hat": None, **changes}
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})

    @property
    def hostile_count(self) -> int:
        """How many nodes are hostile, b."""
        return self.byzantine if isinstance(self.byzantine, int) else len(self.byzantine)

    @model_validator(mode="after")
    def _minority(self) -> Self:
        if isinstance(self.byzantine, tuple):
            wrong = [i for i in self.byzantine if not 0 <= i < self.nodes or self.byzantine.count(i) > 1]
            if wrong:
                raise ValueError(f"byzantine {list(self.byzantine)}: {wrong[0]} is twice there or no node")
        if 2 * self.hostile_count >= self.nodes:
            most = (self.nodes - 1) // 2
            raise ValueError(
                f"byzantine {self.hostile_count} is not a minority of nodes {self.nodes}: the most is {most}"
            )
        return self

    def meaning(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults; of the device, its class.

        >>> Spec(nodes=30, device="cuda:1", backend="torch").meaning()
        {'nodes': 30, 'backend': 'torch', 'device': 'cuda'}
        """
        fields = Spec.model_fields
        values = {key: getattr(self, key) for key, field in fields.items()}
        values |= {"device": self.device.partition(":")[0]}
        if self.backend == "numba":
            del values["backend"]
        return {key: value for key, value in values.items() if value != fields[key].default}


class Execution(CheckedRecord):
    """Where and how a run is made; nothing here changes a number of it."""

    name: str = Field(
        "run",
        description="first part of the run folder's name",
        pattern=r"^[\w.+-]+$",
        examples=["letters, digits and . + - _"],
    )
    seeds: Annotated[str | None, BeforeValidator(_seeds)] = Field(
        None, description="several runs, such as 0-4 or 0,1,7; with intervals"
    )
    data_dir: str | None = Field(
        None, description="folder with the data sets (else RPEL_DATA, the cache, a download)"
    )
    checkpoint_every: int = Field(
        20, description="rounds between checkpoints; 0: only when interrupted", ge=0
    )
    threads: int | None = Field(None, description="threads (unset: as many as cores)", ge=1)
    workers: int = Field(1, description="processes that share the run", ge=1)
    out: str = Field("runs", description="folder for run folders")
    track: Literal["tensorboard", "mlflow", "wandb"] | None = Field(
        None, description="where else the metrics go, as the run goes on: tensorboard, mlflow or wandb"
    )


class Request(Spec, Execution):
    """A Spec with its Execution: what a TOML file, a command line or a run folder holds.

    >>> Request(nodes=30, name="mine").spec == Spec(nodes=30)
    True
    """

    def __init__(self, **fields: Any) -> None:  # for type checkers: values come as people write them
        super().__init__(**fields)

    @property
    def spec(self) -> Spec:
        """What of it determines numbers."""
        given = self.model_dump(exclude_unset=True)
        return Spec(**{key: value for key, value in given.items() if key in Spec.model_fields})


def compared_fields() -> list[str]:
    """The fields in which two settings can differ: runs that differ in the seed alone are one setting.

    >>> [key for key in ("rule", "seed", "threads") if key in compared_fields()]
    ['rule']
    """
    return [key for key in Spec.model_fields if key != "seed"]


def spec_hash(spec: Spec, *others: Mapping[str, str]) -> str:
    """Twelve hexadecimal digits that name a run: its meaning, its data, and what else determines its numbers.

    The Spec has nothing left open: it was resolved, or comes from a run folder. Equal hashes mean equal
    results.

    >>> a, b = Request(threads=1, out="here"), Request(threads=2, out="there")
    >>> spec_hash(a) == spec_hash(b), spec_hash(a) == spec_hash(a.replace(seed=1))
    (True, False)
    """
    content = json.dumps([spec.meaning(), *map(dict, others)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:12]


# --- TOML ---------------------------------------------------------------------------------------------------


def presets() -> list[str]:
    """The names of the presets."""
    return sorted(p.name.removesuffix(".toml") for p in _presets().iterdir() if p.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """Return the TOML of a preset."""
    text: str = (_presets() / f"{name}.toml").read_text("utf-8")
    return text


def _presets() -> Any:
    return resources.files("rpel") / "presets"


def load(source: str | Path) -> Request:
    """The Request of a preset's name, a TOML file, or a run folder.

    >>> load("mnist-100").b_hat
    7
    >>> load("mnist-10")
    Traceback (most recent call last):
    ValueError: there is no preset and no file 'mnist-10'; the nearest is 'mnist-100'
    """
    if str(source) in presets():
        return _made(tomllib.loads(preset_text(str(source))), str(source), str(source))
    path = Path(source)
    if path.is_dir():
        return load_folder(path)
    if not path.is_file():
        raise ValueError(f"there is no preset and no file {str(source)!r}; {nearest(path.stem, presets())}")
    return _made(read_toml(path), path.stem, str(path))


def load_folder(path: Path) -> Request:
    """The Request of a run folder."""
    file = path / "spec.toml"
    if not path.exists():
        raise ValueError(f"there is no run folder {str(path)!r}")
    if not file.is_file():
        raise ValueError(f"{str(path)!r} is not a run folder: it holds no spec.toml")
    return _made(read_toml(file), path.name, str(file), run_folder=True)


def _made(content: dict[str, Any], name: str, where: str, run_folder: bool = False) -> Request:
    fields = {"name": name, **content}
    if not run_folder and "preset" in fields:
        base = fields.pop("preset")
        if base not in presets():
            raise ValueError(f"{where}: {unknown('preset', base, presets())}")
        return load(base).replace(**fields)
    return Request(**fields)


def to_toml(job: Request) -> str:
    """All fields as TOML that :func:`load` reads back, each with its meaning; unset ones stand as comments.

    >>> print(to_toml(Request(byzantine=3))[:60])
    dataset = "mnist-sample"          # data set: a name, or mod
    """
    lines = []
    for key, field in ordered_fields().items():
        value = getattr(job, key)
        written = f"{key} = " if value is None else tomli_w.dumps({key: value}).strip()
        text = f"# {written}".strip() if value is None else written
        hint = " (planned)" if value is None and key in ("pull", "b_hat") else ""
        lines.append(f"{text:<33} # {field.description}{hint}".rstrip())
    return "\n".join(lines) + "\n"


def ordered_fields() -> dict[str, Any]:
    """Return every field of a Request by name: what is trained on and among whom, how, and where."""
    own = {key: field for key, field in Spec.model_fields.items() if key not in Training.model_fields}
    return {**own, **Training.model_fields, **Execution.model_fields}
