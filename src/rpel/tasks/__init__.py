"""Tasks: what the nodes learn. `Task` is one of the user's own; `Objective` is what the simulator and the
peers ask for, and `Classification` is one, for any network and any data.

`own` (the user's task), `task` (the protocols, and who computes what), `batches` (examples by coordinates),
`classification` (what is asked for), `checks` (whether network, loss and data belong together), and the
engines: `autograd` (any torch module, the plain twin), `vmap` (small ones, many nodes at once), and `linear`
and `convolution` (its inner loops in `windows`) for networks of a known form.
"""

from rpel.backend.one_thread import one_torch_thread
from rpel.data import Dataset
from rpel.tasks.batches import Trigger
from rpel.tasks.classification import Classification
from rpel.tasks.own import Task
from rpel.tasks.task import Engine, Metric, Objective

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
