"""Tensors of one device: how they come there and go, how work on them is cut to fit, and which devices exist.

How this works. An operation on 90 victims of 16 rows of 176,050 columns would gather 1 GB. `Chunks` cuts it
first into columns, as many as one victim may use, and then into as many victims as fit the budget: on the
CPU 4 MB, the cache of a core, and the threads of `rpel.backend.threads` share the chunks; on an accelerator
256 MB.

Small things come to the device by `lend` and go by `read`, the one way from the device to the host.
Models go by `host`, for checkpoints and results.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpel.backend.threads import share

BUDGET, CACHED = 256 << 20, 4 << 20
"""Bytes of temporaries at once: on an accelerator, and for each thread in main memory."""


@dataclass(frozen=True)
class Chunks:
    """Tensors of one device; temporaries take at most ``budget`` bytes (0: as the device likes it).

    >>> arrays = Chunks("cpu")
    >>> arrays.host(arrays.array(np.array([3.0, 4.0])))
    array([3., 4.])
    """

    device: str = "cpu"
    budget: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", self.budget or (CACHED if self.main else BUDGET))

    @property
    def main(self) -> bool:
        """Whether arrays lie in main memory."""
        return torch.device(self.device).type == "cpu"

    @cached_property
    def wide(self) -> torch.dtype:
        """The type in which distances are summed: float64 where the device supports it."""
        return torch.float32 if torch.device(self.device).type == "mps" else torch.float64

    # --- between the host and the device ---

    def read(self, x: Tensor) -> NDArray[Any]:
        """A result without d in its shape, on the host: the one way there."""
        return np.asarray(x.detach().cpu().numpy())

    def lend(self, values: Any) -> Tensor:
        """Something small from the host, on the device."""
        return self.narrowed(values).to(self.device)

    def narrowed(self, values: Any) -> Tensor:
        """Values as a tensor, still where they are; in float32 if the device has no float64."""
        given = values if isinstance(values, Tensor) else torch.as_tensor(values)
        return given.to(self.wide) if given.dtype == torch.float64 else given

    def array(self, values: Any) -> Any:
        """Values from anywhere on the device; what is no numbers stays as it is."""
        if isinstance(values, Tensor):
            return self.lend(values)
        given = np.asarray(values)
        return self.lend(np.ascontiguousarray(given)) if given.dtype.kind in "fiub" else given

    def host(self, x: Any) -> Any:
        """Anything as NumPy's; models, too: for checkpoints and results."""
        return self.read(x) if isinstance(x, Tensor) else np.asarray(x)

    # --- pieces ---

    def _pieces(self, size: int, bytes_each: int) -> Iterator[slice]:
        """Slices of 0 … size − 1 whose temporaries fit the budget; at least one element each."""
        step = max(1, self.budget // max(1, bytes_each))
        for start in range(0, size, step):
            yield slice(start, min(size, start + step))

    def _grid(self, h: int, d: int, each: int) -> Iterator[tuple[slice, slice]]:
        """(victims, columns) pieces of an (h, d) result that needs ``each`` bytes of temporaries per entry.

        Columns are cut first to what one victim may use, then as many victims as fit.
        """
        for columns in self._pieces(d, each):
            for victims in self._pieces(h, each * (columns.stop - columns.start)):
                yield victims, columns

    def _over(self, work: Callable[[slice, slice], None], h: int, d: int, each: int) -> None:
        """Call work(victims, columns) for independent pieces of an (h, d) result."""
        pieces = list(self._grid(h, d, each))
        share(lambda piece: work(*pieces[piece]), len(pieces), serial=not self.main)

    def _cached(self, nbytes: int) -> int:
        """Return the bytes of cache for work without temporaries; on an accelerator nothing is cut."""
        return nbytes if self.main else 0

    def _gathered(self, table: Tensor, index: Tensor, columns: slice) -> Tensor:
        """(h, m, w) the rows of an index (h, m), on some columns."""
        found = table[:, columns].index_select(0, index.reshape(-1))
        return found.view(*index.shape, -1)

    def _result(self, table: Tensor, h: int, out: Tensor | None) -> Tensor:
        return table.new_empty((h, table.shape[1])) if out is None else out


# --- devices ------------------------------------------------------------------------------------------------


def local_device(device: str, local_rank: int) -> str:
    """The device of one of several workers on a machine: of "cuda" each has its own.

    >>> local_device("cpu", 1), local_device("cuda:1", 0)
    ('cpu', 'cuda:1')
    """
    if device != "cuda":
        return device
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


def sharing(device: str, here: int) -> int:
    """How many of the ``here`` workers on a machine have the same device.

    >>> sharing("cpu", 2), sharing("cuda:1", 3)
    (2, 3)
    """
    return -(-here // max(1, torch.cuda.device_count())) if device == "cuda" else here


def missing(device: str) -> str | None:
    """Why torch cannot use a device here, in a few words; None where it can.

    >>> missing("cpu") is None
    True
    """
    kind, _, number = device.partition(":")
    if kind == "mps":
        if torch.backends.mps.is_available():
            return None
        return (
            "torch sees no Apple GPU"
            if torch.backends.mps.is_built()
            else f"torch {torch.__version__} has no mps"
        )
    if kind != "cuda":
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU-only build, install one with CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: is its driver there?"
    return None if int(number or 0) < count else f"torch sees {count} of them, numbered from 0"


def free_memory(device: str) -> int | None:
    """Return the bytes that are free on a device; None where it uses the host's memory.

    >>> free_memory("cpu") is None
    True
    """
    kind = device.partition(":")[0]
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if kind == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return None
