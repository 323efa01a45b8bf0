"""What a run and a network of peers share: how a model is trained. And how every configuration record is checked.

Invariants: a record is checked when it is made; what is wrong is one sentence that names the key, the value and what
would be right; whether a field is part of what a run *is* stands in the field's own metadata and nowhere else.
"""

from enum import Enum
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rpel.config.values import builtin, learning_rate, unbounded
from rpel.errors import nearest

Pieces = tuple[tuple[int, float], ...]
"""A learning-rate schedule: (up to and including this round, this rate), …; the last rate holds from then on."""

Alpha = Annotated[Annotated[float, Field(gt=0)] | Literal["inf"], BeforeValidator(unbounded)]
"""Of a Dirichlet distribution; "inf" stays a word, so that it means the same in TOML, JSON and a run's hash."""

Rate = Annotated[float | Pieces, BeforeValidator(learning_rate)]


class Identity(Enum):
    """Whether a field enters a run's hash. A field without such a mark always does.

    LATER is for fields added after version 0.1: they enter only where they differ from their default, so that hashes
    made before stay what they were.
    """

    LATER = "where it differs from its default"
    NEVER = "never"


class CheckedRecord(BaseModel):
    """A frozen record whose errors are one sentence each."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        known = type(self).model_fields
        for key in fields:
            if key not in known:
                raise ValueError(f"there is no field {key!r}; {nearest(key, known)}")
        try:
            super().__init__(**{key: builtin(value) for key, value in fields.items()})
        except ValidationError as error:
            raise ValueError(sentence(type(self), error)) from None

    def but(self, **changes: Any) -> Self:
        """The same record with some fields changed, checked again.

        >>> Training().but(batch_size=50).batch_size
        50
        """
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})

    def identity(self) -> dict[str, Any]:
        """The fields that make this what it is, by the marks in their metadata.

        >>> class Example(CheckedRecord):
        ...     seed: int = 0
        ...     threads: Annotated[int, Identity.NEVER] = 1
        ...     consistent: Annotated[bool, Identity.LATER] = False
        >>> Example(threads=2).identity(), Example(consistent=True).identity()
        ({'seed': 0}, {'seed': 0, 'consistent': True})
        """
        values = self.model_dump()
        for key, field in type(self).model_fields.items():
            later = Identity.LATER in field.metadata and values[key] == field.default
            if later or Identity.NEVER in field.metadata:
                del values[key]
        return values


class Training(CheckedRecord):
    """How each node trains between two exchanges, how it aggregates, and how often it is evaluated.

    >>> Training(lr=[[500, 0.5], [1000, 0.1]]).rate(501)
    0.1
    >>> Training(momentun=0.9)
    Traceback (most recent call last):
    ValueError: there is no field 'momentun'; the nearest is 'momentum'
    """

    model: str = Field("mnist", description="network: mnist, cifar10, femnist, mlp, linear, or the paper's notation")
    rule: str | None = Field(None, description="aggregation, such as mean or nnm+median")
    partition: Literal["dirichlet", "iid", "writer", "virtual", "own"] = Field(
        "dirichlet", description="who holds which data"
    )
    alpha: Alpha = Field(1.0, description="how alike the nodes' data are; small is unlike, inf is alike")
    lr: Rate = Field(0.5, description="learning rate, or a schedule such as 500:0.5,1000:0.1 (up to round:rate)")
    momentum: float = Field(0.9, description="momentum, beta", ge=0, lt=1)
    weight_decay: float = Field(1e-4, description="L2 regularisation, applied after momentum", ge=0)
    batch_size: int = Field(25, description="examples per local step", ge=1)
    local_steps: int = Field(1, description="local steps per round", ge=1)
    eval_every: int = Field(20, description="rounds between evaluations", ge=1)
    eval_size: int = Field(1000, description="test examples of an evaluation (the last round takes all)", ge=1)

    def __init__(self, **fields: Any) -> None:  # for type checkers: values come as people write them
        super().__init__(**fields)

    def rate(self, t: int) -> float:
        """The learning rate of round t = 1, 2, …

        >>> [Training(lr="500:0.5,1000:0.1").rate(t) for t in (1, 500, 501, 2000)]
        [0.5, 0.5, 0.1, 0.1]
        """
        if isinstance(self.lr, float):
            return self.lr
        return next((rate for last, rate in self.lr if t <= last), self.lr[-1][1])


# --- one sentence ----------------------------------------------------------------------------------------------------

_EXAMPLES = {
    "alpha": "a number such as 1.0, or inf",
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
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def sentence(record: type[BaseModel], error: ValidationError) -> str:
    """The first complaint, with the key, the value given and the nearest valid one."""
    found = error.errors()[0]
    if not found["loc"]:
        return str(found.get("ctx", {}).get("error", found["msg"]))
    key, value, context = str(found["loc"][0]), found["input"], found.get("ctx", {})
    field = record.model_fields[key]
    if found["type"] == "missing":
        return f"{key} is missing: it is the {field.description}"
    if found["type"] in ("literal_error", "enum"):
        return f"{key} {value!r} is unknown: {nearest(str(value), _choices(field.annotation))}"
    for bound, words in _BOUNDS.items():
        if bound in context:
            return f"{key} {value} is impossible: it must be {words} {context[bound]}"
    kind = _KINDS.get(found["type"].partition("_")[0], "another value")
    default = field.default
    example = _EXAMPLES.get(key, kind if default is None or isinstance(default, bool) else f"{kind} such as {default}")
    return f"{key} {value!r} is not valid: it takes {example}"


def _choices(annotation: Any) -> list[str]:
    """The words that a field takes: those of a Literal or of an enum."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    return [str(choice) for choice in get_args(annotation)]
