"""What the processes of peers import and load, once for all that are forked on a machine."""

import rpel.peer.api
import rpel.peer.ops.join  # noqa: F401
from rpel.peer.core.protocol import warm

warm()
