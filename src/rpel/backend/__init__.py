"""The array layer: eleven primitives, which `rpel.backend.base` defines, on three kinds of arrays.

- `rpel.backend.plain`: the reference, NumPy in a few obvious lines each;
- `rpel.backend.compiled`: numba on all threads, with `distances`, `coordinates` and `rows` below it;
- `rpel.backend.tensors`: torch on any device, the CPU included, with `chunks` below it.

Every rule is linear (weights from the m × m distances, then one weighted sum of rows) or coordinate-wise
(an operation on sorted values), possibly after a mixing. All take the (n, d) table of models and an (h, m)
index of rows for each of h victims, never a stacked (h, m, d) copy.

Nothing is imported here, so `rpel plan` pays neither for numba nor for torch.
"""
