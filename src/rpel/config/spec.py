"""What a run is, as one frozen record: its fields, their defaults (the quickstart), TOML in and out.

Laws: a Spec is checked when it is made, and whatever is wrong is one sentence that names the key, the value and the
nearest valid one; TOML, command line and Python go through the same checks; nothing here imports torch or numba.
"""

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from rpel.config.values import builtin, learning_rate, parameters, parse_seeds, planned
from rpel.errors import nearest

DatasetName = Literal["mnist-sample", "mnist", "fashion-mnist", "cifar10", "femnist", "own"]
MethodName = Literal[
    "rpel", "all-to-all", "nna", "cs-plus", "gts", "clipped-gossip", "clipped-gossip-oracle", "rtc", "d-psgd",
    "el-local", "el-oracle",
]  # fmt: skip
OWN = "own"
"""The dataset or model of a run that trains objects handed over from Python."""

Pieces = tuple[tuple[int, float], ...]
"""A learning-rate schedule: (up to and including this round, this rate), …; the last rate holds from then on."""


Rate = Annotated[float | Pieces, BeforeValidator(learning_rate)]
Parameters = Annotated[dict[str, Any], BeforeValidator(parameters)]
Planned = Annotated[int | None, BeforeValidator(planned)]


class Spec(BaseModel):
    """Everything that defines a run. Fields left out have the quickstart's values; pull and b_hat are then planned.

    >>> Spec(nodes=30, byzantine=6, attack="alie").rounds
    60
    >>> Spec(nods=30)
    Traceback (most recent call last):
    ValueError: there is no field 'nods'; the nearest is 'nodes'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field("run", description="first part of the run folder's name", pattern=r"^[\w.+-]+$")
    dataset: DatasetName = Field("mnist-sample", description="data set")
    data_dir: str | None = Field(None, description="folder with the data sets (else RPEL_DATA, the cache, a download)")
    model: str = Field("mnist", description="network: mnist, cifar10, femnist, mlp, linear, or the paper's notation")
    nodes: int = Field(20, description="all nodes, n", ge=2)
    byzantine: int = Field(4, description="how many of them are hostile, b", ge=0)
    pull: Planned = Field(None, description="peers pulled per node and round, s", ge=1)
    b_hat: Planned = Field(None, description="hostile answers that a round survives", ge=0)
    confidence: float = Field(0.99, description="probability of the plan, over all nodes and rounds", gt=0, lt=1)
    rounds: int = Field(60, description="rounds, T", ge=1)
    method: MethodName = Field("rpel", description="how nodes exchange models")
    rule: str | None = Field(None, description="aggregation, such as mean or nnm+median")
    graph: Literal["random", "honest-first"] = Field("random", description="how a fixed graph is built")
    placement: Literal["random", "adversarial"] = Field("random", description="where hostile nodes sit on a graph")
    attack: str = Field("alie", description="what hostile nodes send")
    attack_params: Parameters = Field({}, description="its parameters, such as z=1.5 or targeting=most-exposed")
    partition: Literal["dirichlet", "iid", "writer", "virtual"] = Field("dirichlet", description="who holds which data")
    alpha: float = Field(1.0, description="how alike the nodes' data are; small is unlike", gt=0)
    lr: Rate = Field(0.5, description="learning rate, or a schedule such as 500:0.5,1000:0.1 (up to round:rate)")
    momentum: float = Field(0.9, description="momentum, beta", ge=0, lt=1)
    weight_decay: float = Field(1e-4, description="L2 regularisation, applied after momentum", ge=0)
    batch_size: int = Field(25, description="examples per local step", ge=1)
    local_steps: int = Field(1, description="local steps per round", ge=1)
    output: Literal["last", "uniform"] = Field(
        "last", description="the model kept: of the last round, or of a drawn one"
    )
    no_show: float = Field(0.0, description="probability that an honest node misses a round's deadline", ge=0, lt=1)
    silent: bool = Field(False, description="hostile nodes do not answer")
    roaming: bool = Field(False, description="attackers take over other identities each round")
    seed: int = Field(0, description="where all randomness comes from", ge=0)
    seeds: str | None = Field(None, description="several runs, such as 0-4 or 0,1,7; with intervals")
    eval_every: int = Field(20, description="rounds between evaluations", ge=1)
    eval_size: int = Field(1000, description="test examples of an evaluation (the last round takes all)", ge=1)
    checkpoint_every: int = Field(20, description="rounds between checkpoints; 0: only when interrupted", ge=0)
    device: Literal["cpu", "cuda"] = Field("cpu", description="where gradients are computed")
    threads: int | None = Field(None, description="threads (unset: as many as cores)", ge=1)
    out: str = Field("runs", description="folder for run folders")

    def __init__(self, **fields: Any) -> None:
        for key in fields:
            if key not in Spec.model_fields:
                raise ValueError(f"there is no field {key!r}; {nearest(key, Spec.model_fields)}")
        try:
            super().__init__(**{key: builtin(value) for key, value in fields.items()})
        except ValidationError as error:
            raise ValueError(_sentence(error)) from None
        if 2 * self.byzantine >= self.nodes:
            most = (self.nodes - 1) // 2
            raise ValueError(f"byzantine {self.byzantine} is not a minority of nodes {self.nodes}: the most is {most}")

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, value: Any) -> Any:
        if isinstance(value, list | tuple | range):
            value = ",".join(map(str, value))
        value = None if value is None else str(value)
        parse_seeds(value)
        return value

    def but(self, **changes: Any) -> "Spec":
        """The same run with some fields changed, checked again.

        >>> Spec().but(nodes=30).nodes
        30
        """
        return Spec(**{**self.model_dump(exclude_unset=True), **changes})

    def rate(self, t: int) -> float:
        """The learning rate of round t = 1, 2, …

        >>> [Spec(lr="500:0.5,1000:0.1").rate(t) for t in (1, 500, 501, 2000)]
        [0.5, 0.5, 0.1, 0.1]
        """
        if isinstance(self.lr, float):
            return self.lr
        return next((rate for last, rate in self.lr if t <= last), self.lr[-1][1])


# --- one sentence ----------------------------------------------------------------------------------------------------

_EXAMPLES = {
    "lr": "0.5 or 500:0.5,1000:0.1 with rising rounds and positive rates",
    "attack_params": "z=1.5 or JSON such as {\"z\": 1.5}",
    "seeds": "0-4 or 0,1,7, each seed once",
    "name": "letters, digits and . + - _",
    "pull": "a whole number from 1 on, or plan",
    "b_hat": "a whole number from 0 on, or plan",
}  # fmt: skip
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "finite": "a finite number",
    "string": "text",
}


def _sentence(error: ValidationError) -> str:
    """The first complaint, with the key, the value given and the nearest valid one."""
    found = error.errors()[0]
    key, value, context = str(found["loc"][0]), found["input"], found.get("ctx", {})
    if found["type"] == "literal_error":
        choices = get_args(Spec.model_fields[key].annotation)
        return f"{key} {value!r} is unknown: {nearest(str(value), choices)}"
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    for bound, words in bounds.items():
        if bound in context:
            return f"{key} {value} is impossible: it must be {words} {context[bound]}"
    kind = _KINDS.get(found["type"].partition("_")[0], "another value")
    default = Spec.model_fields[key].default
    example = _EXAMPLES.get(key, kind if default is None or isinstance(default, bool) else f"{kind} such as {default}")
    return f"{key} {value!r} is not valid: it takes {example}"


# --- TOML ------------------------------------------------------------------------------------------------------------


def presets() -> list[str]:
    """The names of the presets."""
    return sorted(p.name.removesuffix(".toml") for p in _shelf().iterdir() if p.name.endswith(".toml"))


def _shelf() -> Any:
    return resources.files("rpel.config") / "presets"


def load(source: str | Path) -> Spec:
    """The Spec of a preset's name, a TOML file, or a run folder.

    >>> load("mnist-100").b_hat
    7
    >>> load("mnist-10")
    Traceback (most recent call last):
    ValueError: there is no preset and no file 'mnist-10'; the nearest is 'mnist-100'
    """
    if str(source) in presets():
        return _parsed((_shelf() / f"{source}.toml").read_text("utf-8"), str(source), str(source))
    path = Path(source)
    if path.is_dir():
        return load_folder(path)
    if not path.is_file():
        raise ValueError(f"there is no preset and no file {str(source)!r}; {nearest(path.stem, presets())}")
    return _parsed(path.read_text("utf-8"), path.stem, str(path))


def load_folder(path: Path) -> Spec:
    """The Spec of a run folder."""
    file = path / "spec.toml"
    if not file.is_file():
        raise ValueError(f"{str(path)!r} is not a run folder: it holds no spec.toml")
    return _parsed(file.read_text("utf-8"), path.name, str(file))


def _parsed(text: str, name: str, where: str) -> Spec:
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    return Spec(**{"name": name, **fields})


def to_toml(spec: Spec) -> str:
    """All fields as TOML that :func:`load` reads back, each with its meaning; unset ones stand as comments.

    >>> print(to_toml(Spec(byzantine=3))[:60])
    name = "run"                      # first part of the run fo
    """
    lines = []
    for key, field in Spec.model_fields.items():
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
