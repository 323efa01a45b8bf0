"""The rival that an expert writes with JAX in an afternoon: the whole round is one compiled function.

Node after node (`lax.map`) convolutions as im2col and a matrix product; victim after victim forging by matrix
products, distances from a Gram matrix, nearest-neighbour mixing as a matrix product, and a trimmed mean by a
sorting network pruned to the ranks that are needed; the buffers of models and momenta are donated.
Run by `rivals.py`.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from contestant import BETA, DECAY, Work, Z, comparators, race

Array = Any
SHAPES = {
    "mnist": [(20, 1, 5, 5), (20,), (20, 20, 5, 5), (20,), (500, 320), (500,), (10, 500), (10,)],
    "linear": [(10, 64), (10,)],
}


def unflatten(x: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    parts, at = [], 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        parts.append(x[at : at + size].reshape(shape))
        at += size
    return parts


def convolve_and_pool(images: Array, weight: Array, bias: Array) -> Array:
    """(B, H, W, C) to (B, H', W', F): convolution as im2col, 2 × 2 pooling, rectifier."""
    filters, _, k, _ = weight.shape
    height, width = images.shape[1] - k + 1, images.shape[2] - k + 1
    runs = [images[:, y : y + height, x : x + width] for y in range(k) for x in range(k)]
    actual = jnp.concatenate(runs, -1) @ weight.transpose(2, 3, 1, 0).reshape(-1, filters) + bias
    quads = actual.reshape(len(images), height // 2, 2, width // 2, 2, filters)
    return jax.nn.relu(quads.max((2, 4)))


def loss(x: Array, inputs: Array, labels: Array, network: str) -> Array:
    parts = unflatten(x, SHAPES[network])
    if network == "mnist":
        values = inputs.transpose(0, 2, 3, 1)
        for weight, bias in ((parts[0], parts[1]), (parts[2], parts[3])):
            values = convolve_and_pool(values, weight, bias)
        flat = values.transpose(0, 3, 1, 2).reshape(len(inputs), -1)
        logits = jax.nn.relu(flat @ parts[4].T + parts[5]) @ parts[6].T + parts[7]
    else:
        logits = inputs.reshape(len(inputs), -1) @ parts[0].T + parts[1]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def aggregate(half: Array, own: Array, peers: Array, f: int) -> Array:
    """What one victim makes of its own model and its peers' answers."""
    rows, honest = half[jnp.maximum(peers, 0)], (peers >= 0).astype(half.dtype)
    count = honest.sum()
    mean = honest @ rows / count
    forged = mean + Z * jnp.sqrt(honest @ (rows - mean) ** 2 / (count - 1))
    x = jnp.concatenate([half[own][None], jnp.where(honest[:, None] > 0, rows, forged)])
    gram, m = x @ x.T, len(peers) + 1
    squared = jnp.diag(gram)[:, None] + jnp.diag(gram) - 2 * gram
    _, near = lax.top_k(-jnp.where(jnp.eye(m, dtype=bool), -1.0, squared), m - f)
    y = list(jax.nn.one_hot(near, m).sum(1) @ x / (m - f))
    for low, high in comparators(m, range(f, m - f)):
        y[low], y[high] = jnp.minimum(y[low], y[high]), jnp.maximum(y[low], y[high])
    return sum(y[f : m - f]) / (m - 2 * f)


@partial(jax.jit, donate_argnums=(0, 1), static_argnames=("network", "f", "lr", "together"))
def round_(
    x: Array,
    m: Array,
    inputs: Array,
    labels: Array,
    peers: Array,
    network: str,
    f: int,
    lr: float,
    together: int,
) -> tuple[Array, Array]:
    gradient = jax.grad(partial(loss, network=network))
    g = lax.map(lambda node: gradient(*node), (x, inputs, labels), batch_size=together)
    m = BETA * m + (1 - BETA) * g
    half = x - lr * (m + DECAY * x)
    victims = jnp.arange(len(x)), peers
    return lax.map(lambda one: aggregate(half, one[0], one[1], f), victims, batch_size=together), m


class Rival:
    def __init__(self, work: Work) -> None:
        self.work = work
        self.together = 64 if work.network == "linear" else None  # small models go in batches
        self.x = jnp.tile(jnp.asarray(work.initial), (work.inputs.shape[1], 1))
        self.m = jnp.zeros_like(self.x)

    def step(self, t: int) -> None:
        w = self.work
        data = jnp.asarray(w.inputs[t]), jnp.asarray(w.labels[t]), jnp.asarray(w.peers[t])
        self.x, self.m = round_(
            self.x, self.m, *data, network=w.network, f=w.f, lr=w.lr, together=self.together
        )
        self.x.block_until_ready()

    def models(self) -> Array:
        return self.x


if __name__ == "__main__":
    race(Rival)
