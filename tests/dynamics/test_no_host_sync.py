"""On a GPU the host must not wait for the device in a step, so the step does nothing that would make it wait.

Checked on the CPU, with the portable operations that a GPU runs: every operation that hands a number or a size that
depends on numbers to the host is written down with the place in this package it came from.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from ase.build import bulk
from torch.utils._python_dispatch import TorchDispatchMode

import nvalchemi
from nvalchemi import _kernels
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import (
    FIRE,
    FIRE2,
    LBFGS,
    NPH,
    NPT,
    NVE,
    DemoDynamics,
    FIRE2VariableCell,
    FIREVariableCell,
    NVTLangevin,
    NVTNoseHoover,
    initialize_velocities,
)
from nvalchemi.dynamics.hooks import LoggingHook, NaNDetectorHook
from nvalchemi.hooks import WrapPeriodicHook
from nvalchemi.models.lj import LennardJonesModelWrapper

PACKAGE = str(Path(nvalchemi.__file__).parent)
WAITING = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::bincount", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::_linalg_check_errors",
}  # fmt: skip


class HostWaits(TorchDispatchMode):
    """Counts by place what would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self):
        for name in ("numpy", "tolist", "cpu", "__array__"):
            original = getattr(torch.Tensor, name)

            def method(tensor, *args, _original=original, **kwargs):
                self._note()
                return _original(tensor, *args, **kwargs)

            self._stack.enter_context(mock.patch.object(torch.Tensor, name, method))
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._stack.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        sized_by_mask = name.startswith("aten::index") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8)
            for indices in args
            if isinstance(indices, list | tuple)
            for index in indices
            if isinstance(index, torch.Tensor | None)
        )
        sized_by_counts = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITING or sized_by_mask or sized_by_counts:
            self._note()
        return func(*args, **kwargs)

    def _note(self) -> None:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        where = "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        self.places[where] += 1


def argon(graphs: int = 2, cell: bool = True) -> Batch:
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True) * (2, 2, 2)
    atoms.rattle(0.02, seed=0)
    if not cell:
        atoms.cell, atoms.pbc = None, False
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)] * graphs)
    initialize_velocities(batch, 20.0)
    return batch


def lennard_jones() -> LennardJonesModelWrapper:
    return LennardJonesModelWrapper(0.0104, 3.40, 6.0, switch_width=1.0)


ENGINES = {
    "NVE": lambda model, **o: NVE(model, dt=1.0, **o),
    "DemoDynamics": lambda model, **o: DemoDynamics(model, n_steps=1, dt=1.0, **o),
    "NVTLangevin": lambda model, **o: NVTLangevin(model, 1.0, temperature=20, friction=0.01, **o),
    "NVTNoseHoover": lambda model, **o: NVTNoseHoover(model, 1.0, 20.0, 100.0, **o),
    "NPT": lambda model, **o: NPT(model, 1.0, 20.0, 0.0, 500.0, 100.0, **o),
    "NPH": lambda model, **o: NPH(model, 1.0, 0.0, 500.0, "triclinic", **o),
    "FIRE": lambda model, **o: FIRE(model, 1.0, **o),
    "FIRE2": lambda model, **o: FIRE2(model, 1.0, **o),
    "FIREVariableCell": lambda model, **o: FIREVariableCell(model, 1.0, **o),
    "FIRE2VariableCell": lambda model, **o: FIRE2VariableCell(model, 1.0, **o),
    "LBFGS": lambda model, **o: LBFGS(model, **o),
}
STEPS = 4


def waits(engine, batch: Batch) -> dict[str, int]:
    """Places and numbers of waits in ``STEPS`` steps, after as many in which lists and caches are made."""
    with _kernels.portable_operations():
        engine.run(batch, STEPS)
        with HostWaits() as guard:
            for _ in range(STEPS):
                engine.step(batch)
    return dict(guard.places)


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_waits_only_for_the_decision_on_the_neighbour_list(name):
    assert waits(ENGINES[name](lennard_jones()), argon()) == {"neighbor_list.py:needs_rebuild": STEPS}


def test_the_same_with_graphs_that_have_stopped_and_atoms_that_are_fixed():
    batch = argon(3)
    batch.add_key("status", torch.tensor([[0], [1], [0]]))
    batch.add_key("atom_categories", (torch.arange(batch.num_nodes) % 7 == 0).long())
    engine = NVTLangevin(lennard_jones(), 1.0, temperature=20, friction=0.01)
    assert waits(engine, batch) == {"neighbor_list.py:needs_rebuild": STEPS}


def test_hooks_that_are_not_due_wait_for_nothing(tmp_path):
    hooks = [
        WrapPeriodicHook(frequency=1000),
        LoggingHook(frequency=1000, log_path=tmp_path / "log.csv"),
        NaNDetectorHook(frequency=1000),
    ]
    engine = NVE(lennard_jones(), dt=1.0, hooks=hooks)
    assert waits(engine, argon()) == {"neighbor_list.py:needs_rebuild": STEPS}


def test_the_check_for_values_that_are_not_finite_waits_once():
    found = waits(NVE(lennard_jones(), dt=1.0, hooks=[NaNDetectorHook(extra_keys=["stress"])]), argon())
    assert found == {"neighbor_list.py:needs_rebuild": STEPS, "nan_detector.py:__call__": STEPS}


def test_the_guard_sees_what_makes_the_host_wait():
    x = torch.arange(4.0)
    with HostWaits() as guard:
        for wait in (
            lambda: bool((x > 1).any()), lambda: float(x.sum()), lambda: int(x[0]), lambda: x[1].item(), x.tolist,
            x.numpy, x.cpu, lambda: x[x > 1], lambda: x.nonzero(), lambda: x.index_put_((x > 1,), x[0]),
            lambda: torch.repeat_interleave(x.long()), lambda: torch.linalg.inv(torch.eye(2)),
        ):  # fmt: skip
            seen = guard.places.total()
            wait()
            assert guard.places.total() > seen, wait
        seen = guard.places.total()
        torch.where(x > 1, x, 0).addcmul_(x, x).sum().sqrt()
        assert guard.places.total() == seen


@pytest.mark.parametrize("name", ENGINES)
def test_portable_operations_give_what_compiled_ones_give(name):
    batches = argon(), argon()
    ENGINES[name](lennard_jones()).run(batches[0], 10)
    with _kernels.portable_operations():
        ENGINES[name](lennard_jones()).run(batches[1], 10)
    for field in ("positions", "velocities", "forces", "energy", "stress", "cell"):
        torch.testing.assert_close(batches[1][field], batches[0][field], rtol=1e-9, atol=1e-11)
