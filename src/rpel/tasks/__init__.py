"""Tasks: what the nodes learn. `Task` is one of the user's own; `Objective` is what the simulator and the
peers ask for, and `Classification` is one, for any network and any data.

`own` has the user's task, `objective` the contract, `batches` the examples by coordinates, `checks` whether
network, loss and data fit together, `task` what is asked of an engine. The engines are `autograd` (any torch
module), `vmap` (small ones, many nodes at once), and `linear` and `convolution` for networks of a known form.
"""

from rpel.backend.one_thread import one_torch_thread
from rpel.data import Dataset
from rpel.tasks.batches import Trigger
from rpel.tasks.classification import Classification
from rpel.tasks.objective import Objective
from rpel.tasks.own import Task
from rpel.tasks.task import Engine, Metric

__all__ = [
    "Classification",
    "Dataset",
    "Engine",
    "Metric",
    "Objective",
    "Task",
    "Trigger",
    "one_torch_thread",
]
