"""Define what the nodes learn.

`Task` is what users make. `Objective` is what the simulator and the peers require of a task. `Classification`
is an objective for any network and any data.

`task` has the user's task, `objective` the contract, `examples` the data by coordinates, `checks` whether
network, loss and data fit together, `private` clipped and noisy gradients. `engines` is the table of who
computes; `native` has hand-written convolutions for networks of the paper's form.
"""

from rpel.backend.threads import one_torch_thread
from rpel.data import Dataset
from rpel.tasks.engines import Engine
from rpel.tasks.examples import Trigger
from rpel.tasks.metrics import Metric
from rpel.tasks.objective import Classification, Objective
from rpel.tasks.task import Task

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
