"""The paper's local step as a torch optimiser, for those who write their own training loop.

m ← βm + (1 − β)g from m = 0 without bias correction, then x ← x − η(m + λx). The decay acts after the
momentum, so it is never averaged into m; `torch.optim.SGD` does both differently (m ← βm + g,
with λx inside g).
"""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class LocalMomentum(Optimizer):
    """Algorithm 1, lines 5 and 6: an exponential average of gradients, and a step along it.

    A new gradient enters m with weight 1 − β, and with weight 1 in `torch.optim.SGD`. So a learning rate that
    works there is too small here: divide it by 1 − β. With momentum 0.9, lr=1.0 takes steps as large as
    lr=0.1 does with SGD.

    >>> x = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimiser = LocalMomentum([x], lr=0.5, momentum=0.9, weight_decay=0.1)
    >>> for gradient in (2.0, 4.0):
    ...     x.grad = torch.tensor([gradient])
    ...     optimiser.step()
    >>> round(float(x.detach()), 6)  # m = 0.2, x = 0.85; then m = 0.58, x = 0.85 - 0.5 (0.58 + 0.085)
    0.5175
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be 0 or more, not {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, not {momentum}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, not {weight_decay}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One half-step x → x^{t+1/2} for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, x: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[x]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(x)
        m = state["momentum"].mul_(group["momentum"]).add_(g, alpha=1 - group["momentum"])
        x.sub_(m.add(x, alpha=group["weight_decay"]), alpha=group["lr"])
