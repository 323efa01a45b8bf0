"""The paper's networks, built from its own notation, and their parameters as one vector.

``C(20)-R-M-C(20)-R-M-L(500)-R-L(10)-S`` reads: C(n) convolution to n channels, R rectifier, M max pooling by
2, B batch normalisation, D dropout, L(n) linear to n values (images are flattened before the first),
S log-softmax.

Invariant: a vector holds the trained parameters only, in the module's order. Frozen parameters
(requires_grad=False) and buffers (BatchNorm's statistics) stay with their node.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rpel import component
from rpel.errors import nearest
from rpel.randomness import key

_TOKEN = re.compile(r"([A-Z])(?:\((\d+)\))?")
_LAST_WIDTH = re.compile(r"L\(\d+\)(?!.*L\()")


@dataclass(frozen=True)
class Network:
    """A named network: the paper's notation, its convolutions' kernel and padding, and its input shape."""

    notation: str
    input_shape: tuple[int, ...]
    kernel: int = 5
    padding: int = 0


_CIFAR = "C(64)-R-B-C(64)-R-B-M-D-C(128)-R-B-C(128)-R-B-M-D-L(128)-R-D-L(10)-S"
NETWORKS = {
    "mnist": Network("C(20)-R-M-C(20)-R-M-L(500)-R-L(10)-S", (1, 28, 28)),
    "cifar10": Network(_CIFAR, (3, 32, 32), kernel=3, padding=1),
    "femnist": Network("C(64)-R-M-C(128)-R-M-L(1024)-R-L(62)-S", (1, 28, 28)),
    "linear": Network("L(10)-S", (1, 28, 28)),
    "mlp": Network("L(64)-R-L(10)-S", (1, 28, 28)),
}


def model(
    name_or_notation: str,
    input_shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    *,
    kernel: int | None = None,
    padding: int | None = None,
    dropout: float = 0.25,
    seed: int = 0,
) -> nn.Module:
    """Build a network by name (see NETWORKS), by notation, or by ``module:object`` of a user.

    What is left out comes from the named network; for a notation it is kernel 5 and padding 0.

    A named network takes the number of classes given; a notation must already say it.

    >>> parameter_count(model("mnist")), parameter_count(model("linear", classes=62))
    (176050, 48670)
    >>> model("cifar")
    Traceback (most recent call last):
    ValueError: there is no network 'cifar'; the nearest is 'cifar10'
    """
    if component.is_own(name_or_notation.partition("(")[0]):
        own = component.parse(name_or_notation)
        factory = component.load(own.name, "model")
        return (
            factory
            if isinstance(factory, nn.Module)
            else seeded(partial(factory, **own.bind_to(factory)), seed)
        )
    if "(" in name_or_notation:
        row = Network(name_or_notation, input_shape or ())
    elif name_or_notation in NETWORKS:
        row = NETWORKS[name_or_notation]
    elif name_or_notation in MODULES:
        return seeded(MODULES[name_or_notation], seed)
    else:
        known = [*NETWORKS, *MODULES]
        raise ValueError(f"there is no network {name_or_notation!r}; {nearest(name_or_notation, known)}")
    named = name_or_notation in NETWORKS
    return build(
        _LAST_WIDTH.sub(f"L({classes})", row.notation) if named and classes else row.notation,
        input_shape or row.input_shape,
        classes,
        kernel=row.kernel if kernel is None else kernel,
        padding=row.padding if padding is None else padding,
        dropout=dropout,
        seed=seed,
    )


def takes_numbers(name_or_notation: str) -> bool:
    """Whether a network of this name or notation takes numbers, and not the numbers of words or characters.

    >>> takes_numbers("mlp"), takes_numbers("characters")
    (True, False)
    """
    return name_or_notation not in _TEXTS


def build(
    notation: str,
    input_shape: tuple[int, ...],
    classes: int | None = None,
    *,
    kernel: int,
    padding: int,
    dropout: float = 0.25,
    seed: int = 0,
) -> nn.Module:
    """Build the network that a notation describes, with PyTorch's initialisation.

    The inputs have shape (C, H, W) or (features,).

    The initial values come from (seed, "init") alone; PyTorch's global generator is neither read nor moved.

    >>> build("C(2)-M-L(3)-S", (1, 6, 6), kernel=3, padding=0)
    Sequential(
      (0): Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1))
      (1): MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)
      (2): Flatten(start_dim=1, end_dim=-1)
      (3): Linear(in_features=8, out_features=3, bias=True)
      (4): LogSoftmax(dim=1)
    )
    """
    if len(input_shape) not in (1, 3) or min(input_shape) < 1:
        raise ValueError(f"a network needs an input shape (C, H, W) or (features,), not {input_shape}")
    builder = _Builder(notation, input_shape, kernel, padding, dropout)
    network = seeded(builder.network, seed)
    if classes is not None and builder.shape != (classes,):
        raise ValueError(f"{notation!r} ends in {builder.shape[0]} values, but there are {classes} classes")
    return network


Factory = Callable[[], nn.Module]
"""A class or a function without arguments that makes a network."""


def seeded(factory: Factory, seed: int) -> nn.Module:
    """Call the factory with torch seeded from (seed, "init"); torch's global generator is not moved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(key(seed, "init")[0]))
        return factory()


def initialised(given: nn.Module | Factory, seed: int) -> nn.Module:
    """Return the module itself, or the one that a factory makes under this seed.

    >>> one, other = (initialised(lambda: nn.Linear(2, 1), seed) for seed in (0, 1))
    >>> torch.equal(one.weight, other.weight)
    False
    """
    if isinstance(given, nn.Module):
        return given
    name = getattr(given, "__name__", type(given).__name__)
    try:
        inspect.signature(given).bind()
    except TypeError as error:
        raise ValueError(
            f"model {name} cannot be called without arguments ({error}): pass a function that gives them, "
            "such as lambda: CNN(width=64)"
        ) from None
    except ValueError:  # some callables have no signature
        pass
    module = seeded(given, seed)
    if not isinstance(module, nn.Module):
        raise ValueError(f"model {name} makes a {type(module).__name__}, not a torch.nn.Module")
    return module


class _Builder:
    """Walks over the tokens, keeping the shape that the next layer will see."""

    def __init__(
        self, notation: str, shape: tuple[int, ...], kernel: int, padding: int, dropout: float
    ) -> None:
        self.notation, self.shape = notation, shape
        self.kernel, self.padding, self.dropout = kernel, padding, dropout
        self.layers: list[nn.Module] = []
        self.where = ""

    def network(self) -> nn.Sequential:
        tokens = self.notation.split("-")
        for position, token in enumerate(tokens, 1):
            self.where = f"token {position}, {token!r}, of {self.notation!r}"
            letter, width = self._parsed(token)
            if letter == "S" and position != len(tokens):
                raise ValueError(f"{self.where}: S can only stand at the end")
            _LAYERS[letter](self, width)
        if len(self.shape) != 1:
            raise ValueError(f"{self.where}: a network must end in L(n) or L(n)-S")
        return nn.Sequential(*self.layers)

    def _parsed(self, token: str) -> tuple[str, int]:
        match = _TOKEN.fullmatch(token)
        if not match or match[1] not in _LAYERS:
            raise ValueError(f"{self.where}: not a layer; the layers are C(n), R, M, B, D, L(n) and S")
        letter, width = match[1], match[2]
        if (letter in "CL") != (width is not None) or (width is not None and int(width) < 1):
            form = f"{letter}(n) with n from 1 on" if letter in "CL" else f"plain {letter}"
            raise ValueError(f"{self.where}: write it as {form}")
        return letter, int(width or 0)

    def _image(self) -> tuple[int, int, int]:
        if len(self.shape) != 3:
            raise ValueError(f"{self.where}: needs an image, and there is none after L or for flat inputs")
        channels, height, width = self.shape
        return channels, height, width

    def _fits(self, channels: int, height: int, width: int) -> None:
        if min(height, width) < 1:
            raise ValueError(
                f"{self.where}: the image of {self.shape[1]} × {self.shape[2]} is too small for it"
            )
        self.shape = (channels, height, width)

    def convolution(self, width: int) -> None:
        channels, rows, columns = self._image()
        shrink = self.kernel - 1 - 2 * self.padding
        self._fits(width, rows - shrink, columns - shrink)
        self.layers.append(nn.Conv2d(channels, width, self.kernel, padding=self.padding))

    def pooling(self, _: int) -> None:
        channels, rows, columns = self._image()
        self._fits(channels, rows // 2, columns // 2)
        self.layers.append(nn.MaxPool2d(2))

    def normalisation(self, _: int) -> None:
        self.layers.append(nn.BatchNorm2d(self._image()[0]))

    def linear(self, width: int) -> None:
        if len(self.shape) == 3:
            self.layers.append(nn.Flatten())
        self.layers.append(nn.Linear(torch.Size(self.shape).numel(), width))
        self.shape = (width,)


_LAYERS: dict[str, Callable[[_Builder, int], None]] = {
    "C": _Builder.convolution,
    "R": lambda builder, _: builder.layers.append(nn.ReLU()),
    "M": _Builder.pooling,
    "B": _Builder.normalisation,
    "D": lambda builder, _: builder.layers.append(nn.Dropout(builder.dropout)),
    "L": _Builder.linear,
    "S": lambda builder, _: builder.layers.append(nn.LogSoftmax(dim=1)),
}


class BagOfWords(nn.Module):
    """Texts as numbers of words (N, length), 0 for none: the mean of the words' vectors, then two layers.

    >>> BagOfWords()(torch.tensor([[5, 7, 0, 0]])).shape
    torch.Size([1, 2])
    """

    def __init__(self, vocabulary: int = 8192, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, words: Tensor) -> Tensor:
        there = (words != 0).unsqueeze(-1)
        mean = (self.words(words) * there).sum(dim=1) / there.sum(dim=1).clamp(min=1)
        result: Tensor = self.layers(mean)
        return result


class _Block(nn.Module):
    """Causal attention, then two layers, each added to what entered."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.attention, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.between = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        split = self.attention(self.before(x)).view(n, length, 3, self.heads, width // self.heads)
        query, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        result: Tensor = x + self.layers(self.between(x))
        return result


class CausalTransformer(nn.Module):
    """A transformer that scores the next character at every position of a text.

    Maps characters as numbers (N, length) to scores (N, characters, length).

    >>> network = CausalTransformer()
    >>> network(torch.zeros(2, 64, dtype=torch.int64)).shape, parameter_count(network)
    (torch.Size([2, 65, 64]), 818241)
    """

    def __init__(
        self, characters: int = 65, length: int = 64, width: int = 128, heads: int = 4, blocks: int = 4
    ) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(blocks)))
        self.end, self.out = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        result: Tensor = self.out(self.end(self.blocks(x))).mT
        return result


def _normed(inside: int, outside: int, kernel: int, stride: int) -> nn.Sequential:
    """A convolution that keeps the image, but for its stride, and normalisation by groups of channels."""
    convolution = nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(32, outside))


class _Residual(nn.Module):
    """Two convolutions, added to what entered."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _normed(inside, outside, 3, stride), nn.ReLU(), _normed(outside, outside, 3, 1)
        )
        same = stride == 1 and inside == outside
        self.around = nn.Identity() if same else _normed(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.layers(x) + self.around(x))


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 × 32 pixels (N, 3, 32, 32), with GroupNorm.

    GroupNorm has no local state.

    >>> parameter_count(ResNet18())
    11173962
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        strides = (1, 1, 2, 1, 2, 1, 2, 1)
        blocks = [_Residual(*each) for each in zip(widths, widths[1:], strides, strict=False)]
        self.layers = nn.Sequential(_normed(3, 64, 3, 1), nn.ReLU(), *blocks)
        self.out = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.layers(x).mean(dim=(2, 3)))
        return result


MODULES: dict[str, Callable[[], nn.Module]] = {
    "words": BagOfWords, "characters": CausalTransformer, "resnet18": ResNet18
}  # fmt: skip
"""Networks that are no chain of layers, made for the data sets fdu-mtl, shakespeare and cifar10."""
_TEXTS = ("words", "characters")


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained and exchanged, by name: all that require a gradient.

    >>> network = model("linear")
    >>> network[1].weight.requires_grad = False
    >>> list(trained(network))
    ['1.bias']
    """
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of each trained parameter, in the order of the vector.

    >>> shapes(model("linear"))
    {'1.weight': (10, 784), '1.bias': (10,)}
    """
    return {name: tuple(parameter.shape) for name, parameter in trained(module).items()}


def parameter_count(module: nn.Module) -> int:
    """d, the length of the vector.

    >>> parameter_count(model("mlp"))
    50890
    """
    return sum(parameter.numel() for parameter in trained(module).values())


def flatten(module: nn.Module) -> Tensor:
    """The trained parameters as a new vector (d,), detached.

    >>> flatten(model("mnist")).shape
    torch.Size([176050])
    """
    parts = [parameter.detach().reshape(-1) for parameter in trained(module).values()]
    return torch.cat(parts) if parts else torch.empty(0)


def unflatten(module: nn.Module, vector: Tensor) -> None:
    """Load a vector (d,) into the trained parameters, by copy; frozen ones and buffers stay as they are.

    >>> network = model("linear")
    >>> unflatten(network, torch.zeros(7850))
    >>> float(flatten(network).abs().sum())
    0.0
    """
    if vector.shape != (parameter_count(module),):
        raise ValueError(
            f"the module has {parameter_count(module)} trained parameters, but the vector's shape is "
            f"{tuple(vector.shape)}"
        )
    with torch.no_grad():
        parameters = list(trained(module).values())
        parts = torch.split(vector, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.reshape(parameter.shape))
