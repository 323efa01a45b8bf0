"""Tasks: what the nodes learn. `Task` is what the simulator and the peers ask for, `Classification` is one.

`task` (the protocols, and who computes what), `batches` (examples by coordinates), `classification` (the task), and the
engines: `autograd` (any torch module, the plain twin), `vmap` (small ones, many nodes at once), and `linear` and
`convolution` (its inner loops in `windows`) for networks of a known form.
"""

from rpel.tasks.batches import Trigger
from rpel.tasks.classification import Classification
from rpel.tasks.task import Engine, Task, one_torch_thread

__all__ = ["Classification", "Engine", "Task", "Trigger", "one_torch_thread"]
