"""The hot arithmetic of aggregation and forging: a handful of primitives,
each in three twins of the same meaning.

- `rpel.backend.plain`: NumPy, short, obviously right;
- `rpel.backend.compiled`: numba, all cores, what the simulator and the peers use;
- `rpel.backend.torch`: tensors, on any device of torch (it and its `tensors`, `devices`, `ordering`,
  `one_thread` import torch).

Every rule is linear (coefficients from the m × m distances, then one weighted sum of rows: `combine`) or
coordinate-wise (`coordinatewise`), possibly after a mixing. All take the (n, d) table of models and an (h, m)
index of rows for each of h victims, never a stacked (h, m, d) copy.

Invariants:
1. results do not depend on the number of threads, bit for bit, and repeat exactly;
2. only kept rows enter a sum: hostile values outside the kept set, however huge, leave no trace;
3. distances are differences accumulated in float64,
   and equal pairs of rows get equal bits wherever they stand;
4. beside the result, memory stays below a tenth of the table.

Under `compiled`: `cache` (machine code and where it is stored), `pool` (who computes), `vectors` (loops
written as vector instructions), `sorting` (networks, neighbours), `distances`, `coordinates`. `plain` also
checks what the NumPy twins accept.

Nothing is imported here: who needs one twin pays for one.
"""
