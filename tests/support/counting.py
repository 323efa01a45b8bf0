"""What torch does inside a `with`: kernels, bytes alive at most beside what was there,
copies between devices."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOTHING = {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided", "detach", "alias"}
"""Operations without a kernel, beside views."""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts in the calling thread. A storage lives as long as one of the tensors on it that Python has seen.

    >>> import torch
    >>> with Counter() as found:
    ...     x = torch.zeros(1000).add_(1)[:5]
    >>> found.kernels, found.peak, found.copied
    (2, 4000, [])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels, self.live, self.peak = 0, 0, 0
        self.copied: list[tuple[int, ...]] = []
        self.kinds = set[tuple[str, Any]]()  # what was made: the kind of device, and of numbers
        self._storages: dict[int, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {_storage(leaf) for leaf in given}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        nothing = func.is_view or func.namespace == "prim" or func.overloadpacket.__name__ in _NOTHING
        self.kernels += not nothing
        for one in made:
            self.kinds.add((one.device.type, one.dtype))
            if any(other.device != one.device for other in given if other.dim() or "_to_copy" in str(func)):
                self.copied.append(tuple(one.shape))
            self._noted(one, new=_storage(one) not in known)
        return result

    def _noted(self, one: Tensor, new: bool) -> None:
        key = _storage(one)
        if key not in self._storages:
            if not new:
                return  # it was there before
            self._storages[key] = [0, one.untyped_storage().nbytes()]
            self.live += self._storages[key][1]
            self.peak = max(self.peak, self.live)
        self._storages[key][0] += 1
        weakref.finalize(one, self._gone, key)

    def _gone(self, key: int) -> None:
        entry = self._storages[key]
        entry[0] -= 1
        if not entry[0]:
            self.live -= entry[1]
            del self._storages[key]


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
