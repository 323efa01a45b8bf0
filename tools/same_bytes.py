"""Check that a change keeps the bytes of runs: tools/same_bytes.py BASE [--only NAME…] [--keep FOLDER].

Makes about ninety small runs (every method, rule, attack and engine, faults, workers, resuming, presets,
models and data from Python) with the sources of the commit BASE and with those of the working tree, on this
machine. Compares models.safetensors, counts.npz, nodes.npz, certificate.json and metrics.jsonl, except
seconds and versions. Prints a line for each run that differs, with the first difference; the exit status is
then 1. A run that only the working tree can make is reported as new, and so are keys that only it writes.

A tree may have other fields than BASE. Each run is written with the fields of today; `BEFORE` has its older
spelling, which a tree gets if its Spec still has one of the older fields. Between trees with different
fields, hashes and certificate entries that quote the fields are not compared, and keys that the working tree
no longer writes are listed but are no difference. Models, counts, nodes and metrics must be equal as ever.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

Fields = dict[str, Any]
ROOT = Path(__file__).parents[1]
SMALL: Fields = {
    "model": "linear", "nodes": 10, "byzantine": 2, "pull": 6, "rounds": 4, "eval_every": 2, "eval_size": 100,
    "batch_size": 10, "threads": 2, "attack": "alie",
}  # fmt: skip
METHODS = (
    "all-to-all", "nna", "cs-plus", "gts", "gts-exact", "clipped-gossip", "clipped-gossip-oracle", "rtc",
    "ios", "balance", "d-psgd", "el-local", "el-oracle",
)  # fmt: skip
RULES = (
    "mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centered_clipping", "mda",
    "monna", "meamed", "smea", "caf", "aksel", "cge", "dnc", "balance", "nnm+median", "nnm+krum",
    "bucketing+median", "clipping+trimmed_mean", "arc+trimmed_mean", "nnm+geometric_median",
)  # fmt: skip
ATTACKS = (
    "sf", "foe", "ipm", "alie(z=max)", "dissensus", "mimic", "mimic_heuristic", "stale(delay=2)", "inf",
    "gaussian", "min_max", "min_sum(direction=unit)", "fang", "spectral", "strongest(of=alie+spectral)",
    "none", "label_flip", "backdoor",
)  # fmt: skip
SMALL_PRESET = ("--dataset", "mnist-sample", "--rounds", "2")
BEFORE: dict[str, Fields] = {
    "attack-alie": {"attack": "alie", "attack_params": {"z": "max"}},
    "attack-stale": {"attack": "stale", "attack_params": {"delay": 2}},
    "attack-min_sum": {"attack": "min_sum", "attack_params": {"direction": "unit"}},
    "attack-strongest": {"attack": "strongest", "attack_params": {"of": "alie+spectral"}},
    "consistent": {"attack": "strongest", "consistent": True},
    "most-exposed": {"attack": "alie", "attack_params": {"targeting": "most-exposed"}},
    "flood": {"attack": "alie", "attack_params": {"flood": True}},
    "adversarial-placement": {"method": "cs-plus", "placement": "adversarial"},
    "honest-first": {"method": "rtc", "graph": "honest-first"},
    "dirichlet": {"partition": "dirichlet", "alpha": 0.5},
    "virtual": {"partition": "virtual", "alpha": 0.5},
    "asynchronous": {"timing": None, "asynchronous": True, "speeds": "lognormal:0.5+stragglers:0.2,5",
                     "jitter": 0.2},
    "asynchronous-stale": {"timing": None, "asynchronous": True, "speeds": "stragglers:0.2,5"},
    "asynchronous-latency": {"timing": None, "asynchronous": True, "latency": 0.3},
    "steps": {"lr": ((2, 0.5), (4, 0.1)), "optimizer_params": None},
    "adamw": {"optimizer": "adamw", "optimizer_params": {"eps": 1e-6}},
    "outer": {"outer": "nesterov", "outer_lr": 0.6, "outer_momentum": 0.8},
    "privacy": {"privacy": None, "max_grad_norm": 1.0, "noise_multiplier": 1.1, "target_delta": 1e-4},
    "privacy-planned": {"privacy": None, "max_grad_norm": 1.0, "target_epsilon": 8.0, "target_delta": 1e-4},
}  # fmt: skip
"""Fields for a tree whose Spec has one that the run of `cases` does not have; None removes a field."""
SAMPLING = (
    "plan", "held", "guarantee", "max_observed", "histogram", "violations", "violations_total",
    "aggregations", "seed", "data", "privacy",
)  # fmt: skip
"""Keys of certificate.json that do not depend on how the fields of a run are written."""


def cases() -> dict[str, Fields]:
    """Return every run by its name: its differences from SMALL; fields with a dash say how it is made."""
    by_name: dict[str, Fields] = {"plain": {}}
    by_name |= {f"method-{name}": {"method": name, **_rival(name)} for name in METHODS}
    by_name |= {f"rule-{name}": {"rule": name, "pull": 8} for name in RULES}
    by_name |= {f"attack-{text.partition('(')[0]}": {"attack": text} for text in ATTACKS}
    by_name |= {f"preset-{name}": {"_preset": name} for name in ("quickstart", "mnist-30", "mnist-100")}
    by_name |= {
        "engine-mlp": {"model": "mlp"},
        "engine-convolution": {"model": "mnist", "nodes": 6, "byzantine": 1, "pull": 4, "rounds": 2},
        "engine-batchnorm": {"model": "C(4)-R-B-M-D-L(10)-S", "nodes": 6, "byzantine": 1, "pull": 4},
        "engine-label-flip-batchnorm": {"model": "C(4)-R-B-M-L(10)-S", "nodes": 6, "byzantine": 1, "pull": 4,
                                        "attack": "label_flip"},
        "local-steps": {"local_steps": 3, "lr": ((2, 0.5), (4, 0.1))},
        "steps": {"lr": "steps(2:0.5, 4:0.1)"},
        "cosine": {"lr": "cosine(0.5, warmup=2)"},
        "adamw": {"optimizer": "adamw(eps=1e-6)", "lr": 0.01, "local_steps": 2},
        "outer": {"outer": "nesterov(0.6, momentum=0.8)", "local_steps": 2},
        "privacy": {"privacy": "dp(clip=1, noise=1.1, delta=1e-4)", "local_steps": 2},
        "privacy-planned": {"privacy": "dp(clip=1, epsilon=8, delta=1e-4)"},
        "uniform": {"output": "uniform", "rounds": 6},
        "no-show": {"no_show": 0.2, "rule": "bucketing+median", "pull": 9, "nodes": 12},
        "no-show-graph": {"no_show": 0.2, "method": "clipped-gossip-oracle"},
        "silent": {"silent": True, "pull": 8},
        "consistent": {"attack": "strongest(consistent=true)"},
        "most-exposed": {"attack": "alie(targeting=most-exposed)"},
        "flood": {"method": "el-local", "attack": "alie(flood=true)"},
        "adversarial-placement": {"method": "cs-plus(placement=adversarial)"},
        "honest-first": {"method": "rtc(graph=honest-first)"},
        "dirichlet": {"partition": "dirichlet(0.5)"},
        "virtual": {"partition": "virtual(0.5)", "nodes": 40, "byzantine": 4, "pull": 10},
        "virtual-label-flip": {"partition": "virtual", "attack": "label_flip"},
        "iid": {"partition": "iid"},
        "int8": {"wire": "int8", "attack": "strongest"},
        "asynchronous": {"timing": "asynchronous(speeds=lognormal(0.5)+stragglers(0.2, 5), jitter=0.2)"},
        "asynchronous-stale": {"timing": "asynchronous(speeds=stragglers(0.2, 5))", "attack": "stale"},
        "asynchronous-latency": {"timing": "asynchronous(latency=0.3)"},
        "workers": {"workers": 2},
        "workers-fang": {"workers": 2, "attack": "fang", "output": "uniform"},
        "resume": {"checkpoint_every": 1, "output": "uniform", "attack": "stale", "_interrupt": 2},
        "own-model": {"_own": "sequential"},
        "own-batchnorm": {"_own": "batchnorm", "local_steps": 2},
        "own-odd": {"_own": "odd"},
        "own-nodes": {"_own": "per_node"},
        "regression": {"_own": "regression", "partition": "iid"},
    }  # fmt: skip
    return by_name


def _rival(method: str) -> Fields:
    return {"pull": None} if method in ("all-to-all", "nna") else {}


def spelling(name: str, known: set[str]) -> Fields:
    """Return the fields of the run `name` for a tree whose Spec has the fields `known`.

    >>> spelling("virtual", {"partition", "alpha"})["alpha"], "alpha" in spelling("virtual", {"partition"})
    (0.5, False)
    """
    now, before = cases()[name], BEFORE.get(name, {})
    return {**now, **before} if known & (set(before) - set(now)) else now


# --- one tree -----------------------------------------------------------------------------------------------


def spec_fields() -> set[str]:
    """Return the names of the fields of a run in the tree that this process imports."""
    place = "rpel.spec" if importlib.util.find_spec("rpel.spec") else "rpel.config.spec"
    classes = importlib.import_module(place).Spec.__mro__
    return {name for cls in classes for name in vars(cls).get("__annotations__", {})}


def run_all(out: Path, names: list[str]) -> None:
    """Make the runs with the rpel that this process imports; a run that fails leaves its traceback."""
    known = spec_fields()
    (out / "fields").write_text("\n".join(sorted(known)), "utf-8")
    for name in names:
        try:
            path = _run(spelling(name, known), out / name)
            (out / name / "folder").write_text(str(path.relative_to(out / name)), "utf-8")
        except Exception:
            (out / name).mkdir(parents=True, exist_ok=True)
            (out / name / "error").write_text(traceback.format_exc(limit=-4), "utf-8")
        print(".", end="", file=sys.stderr, flush=True)


def _run(changes: Fields, out: Path) -> Path:
    import rpel

    if "_preset" in changes:
        command = [sys.executable, "-m", "rpel", "run", changes["_preset"], *SMALL_PRESET, "--out", str(out)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(ended.stderr.strip())
        (folder,) = out.glob("*")
        return folder
    fields = {**SMALL, **changes, "out": str(out)}
    objects, interrupt = _objects(fields.pop("_own", None)), fields.pop("_interrupt", None)
    fields = {key: value for key, value in fields.items() if value is not None and key not in objects}
    if "train" in objects:
        fields = {key: value for key, value in fields.items() if key != "model"}
    if interrupt is None:
        return Path(str(rpel.simulate(**fields, **objects).path))

    def stop(progress: Any) -> None:
        if progress.round == interrupt:
            raise KeyboardInterrupt

    try:
        rpel.simulate(**fields, **objects, progress=stop)
    except KeyboardInterrupt:
        (folder,) = out.glob("*")
    return Path(str(rpel.resume(folder).path))


def _objects(kind: str | None) -> Fields:
    """Models and data as a user hands them over."""
    if kind is None:
        return {}
    import numpy as np
    import torch
    from torch import nn

    class Odd(nn.Module):
        """Nothing that a fast engine knows."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(5, 8), nn.Parameter(torch.ones(8))
            self.last = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x)) * self.scale
            out: torch.Tensor = self.last(hidden.sort(dim=-1).values)
            return out

    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {
        "sequential": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        "per_node": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        "batchnorm": lambda: nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)
        ),
        "regression": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)),
        "odd": Odd,
    }
    source = np.random.default_rng(0)
    x = source.normal(size=(400, 5)).astype(np.float32)
    y: Any = (
        x[:, 0].astype(np.float32) if kind == "regression" else (x[:, :3].argmax(axis=1)).astype(np.int64)
    )
    train: Any = (x[:320], y[:320])
    if kind == "per_node":
        train = [(x[40 * i : 40 * (i + 1)], y[40 * i : 40 * (i + 1)]) for i in range(8)]
    more = {"loss": nn.functional.mse_loss} if kind == "regression" else {}
    return {"model": made[kind](), "train": train, "test": (x[320:], y[320:]), **more}


# --- comparing ----------------------------------------------------------------------------------------------


def differences(base: Path, head: Path, same_fields: bool) -> Iterator[str]:
    """Yield what differs between the folders of two runs, one sentence each."""
    import numpy as np

    if (base / "models.safetensors").read_bytes() != (head / "models.safetensors").read_bytes():
        yield "models.safetensors"
    for name in ("counts.npz", "nodes.npz"):
        with np.load(base / name) as old, np.load(head / name) as new:
            for key in old.files:
                if key not in new.files or not np.array_equal(old[key], new[key], equal_nan=True):
                    yield f"{name}: {key}"
    old, new = _certificate(base), _certificate(head)
    if not same_fields:
        old, new = ({key: whole[key] for key in SAMPLING if key in whole} for whole in (old, new))
    yield from _keys("certificate.json", old, new, same_fields)
    rows = [_rows(folder) for folder in (base, head)]
    if len(rows[0]) != len(rows[1]):
        yield f"metrics.jsonl: {len(rows[0])} and {len(rows[1])} rows"
    for number, (before, after) in enumerate(zip(*rows, strict=False), 1):
        yield from _keys(f"metrics.jsonl, round {number}", before, after, same_fields)
    names = [folder.name for folder in (base, head)]
    if same_fields and names[0][-12:] != names[1][-12:]:
        yield f"the hash: {names[0]} and {names[1]}"


def _certificate(folder: Path) -> Fields:
    content: Fields = json.loads((folder / "certificate.json").read_text("utf-8"))
    return {key: value for key, value in content.items() if key not in ("versions", "objects")}


def _rows(folder: Path) -> list[Fields]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def _keys(where: str, old: Fields, new: Fields, same_fields: bool) -> Iterator[str]:
    """Yield the keys of records whose values differ, at any depth, but not those that only the new one has.

    Between trees with different fields, a key that only the old one has is no difference either.
    """
    for key, value in old.items():
        if key not in new and not same_fields:
            continue
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            pairs: Iterator[tuple[Fields, Fields]] = zip_longest(value, new.get(key) or [], fillvalue={})
            for number, (item, other) in enumerate(pairs, 1):
                if bool(item) != bool(other):
                    yield f"{where}: {key}, entry {number}: {item or None} and {other or None}"[:200]
                else:
                    yield from _keys(f"{where}: {key}", item, other, same_fields)
        elif isinstance(value, dict) and isinstance(new.get(key), dict):
            yield from _keys(f"{where}: {key}", value, new[key], same_fields)
        elif key not in new or new[key] != value:
            yield f"{where}: {key} {value!r} and {new.get(key)!r}"[:200]


def written(folder: Path) -> set[str]:
    """Return the keys of a run's last row and of its certificate."""
    rows = _rows(folder)[-1:]
    return {f"metrics.jsonl: {key}" for row in rows for key in row} | {
        f"certificate.json: {key}" for key in _certificate(folder)
    }


def compare(out: Path, names: list[str]) -> int:
    """Print what differs; return the number of runs that do."""
    changed, models, more, fewer = 0, 0, set(), set()
    fields = [set((out / side / "fields").read_text("utf-8").splitlines()) for side in ("base", "head")]
    same_fields = fields[0] == fields[1]
    for name in names:
        sides = [out / side / name for side in ("base", "head")]
        errors = [(side / "error").read_text("utf-8") if (side / "error").is_file() else "" for side in sides]
        last = [error.splitlines()[-1][:200] if error else "" for error in errors]
        if errors[0] and not errors[1]:
            print(f"{name}: new ({last[0]})")
        elif errors[1] and (not errors[0] or (same_fields and last[0] != last[1])):
            changed += 1
            print(f"{name}: fails\n{errors[1]}")
        elif errors[1]:
            print(f"{name}: refused by both ({last[1]})")
        else:
            base, head = (side / (side / "folder").read_text("utf-8") for side in sides)
            changes = list(differences(base, head, same_fields))
            more |= written(head) - written(base)
            fewer |= written(base) - written(head)
            models += "models.safetensors" in changes
            if changes:
                changed += 1
                print(
                    f"{name}: {changes[0]}" + (f" (and {len(changes) - 1} more)" if len(changes) > 1 else "")
                )
    for what, keys in (
        ("fields only now", fields[1] - fields[0]),
        ("no longer fields", fields[0] - fields[1]),
        ("written only now", more),
        ("no longer written", fewer),
    ):
        if keys:
            print(f"{what}:", ", ".join(sorted(keys)))
    print(f"{len(names) - changed} of {len(names)} runs have the same bytes; models differ in {models}")
    return changed


def main() -> int:
    """Run both trees, one after the other, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="a commit")
    parser.add_argument("--only", nargs="+", default=None, help="names of runs, or their beginnings")
    parser.add_argument(
        "--keep", type=Path, default=None, help="a folder for the runs; those of BASE there are reused"
    )
    given = parser.parse_args()
    names = [name for name in cases() if given.only is None or name.startswith(tuple(given.only))]
    with tempfile.TemporaryDirectory(prefix="same-bytes-") as scratch:
        out = (given.keep or Path(scratch)).resolve()
        commit = _git("rev-parse", "--short=12", given.base)
        stored = out / f"base-{commit}"
        missing = [name for name in names if not (stored / name).is_dir()]
        if missing or not (stored / "fields").is_file():
            tree = Path(scratch) / "tree"
            _git("worktree", "add", "--detach", str(tree), commit)
            try:
                _made(tree / "src", stored, missing)
            finally:
                _git("worktree", "remove", "--force", str(tree))
        (Path(scratch) / "both").mkdir()
        (Path(scratch) / "both" / "base").symlink_to(stored)
        _made(ROOT / "src", Path(scratch) / "both" / "head", names)
        print(file=sys.stderr)
        return 1 if compare(Path(scratch) / "both", names) else 0


def _made(source: Path, out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, __file__, "--run", str(out), *names], env=environment, check=True)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        import logging

        logging.disable(logging.WARNING)
        run_all(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
