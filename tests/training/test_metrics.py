"""Streaming errors: against NumPy, in pieces, with labels missing, by element and group."""

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.training.metrics import ErrorMetrics

SIZES = (1, 3, 2, 5)
ELEMENTS = (8, 1, 6, 1, 8)


def make_graphs(seed: int = 0) -> list[AtomicData]:
    generator = torch.Generator().manual_seed(seed)
    return [
        AtomicData(
            positions=torch.zeros(n, 3),
            atomic_numbers=list(ELEMENTS[:n]),
            energy=torch.randn(1, 1, generator=generator) - 300,
            forces=torch.randn(n, 3, generator=generator),
            stress=torch.randn(1, 3, 3, generator=generator),
            info={"config_type": "small" if n < 3 else "large"},
        )
        for n in SIZES
    ]


def predict(batch: Batch) -> dict[str, torch.Tensor]:
    """A model whose error depends on nothing but the label."""
    return {name: batch[name] + 0.1 * torch.sin(7 * batch[name]) for name in ("energy", "forces", "stress")}


def accumulate(batches, **options) -> ErrorMetrics:
    metrics = ErrorMetrics(**options)
    for batch in batches:
        metrics.update(predict(batch), batch)
    return metrics


def test_values_are_those_of_numpy():
    batch = Batch.from_data_list(make_graphs())
    metrics = accumulate([batch]).compute()
    for name in ("energy", "forces", "stress"):
        error = (predict(batch)[name].double() - batch[name].double()).numpy()
        assert metrics[f"{name}_mae"] == pytest.approx(np.abs(error).mean(), rel=1e-12)
        assert metrics[f"{name}_rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-12)
    per_atom = (predict(batch)["energy"].double() - batch.energy.double()).numpy()[:, 0] / SIZES
    assert metrics["energy_per_atom_mae"] == pytest.approx(np.abs(per_atom).mean(), rel=1e-12)


def test_energy_error_per_atom_of_sizes_1_and_99():
    graphs = [
        AtomicData(positions=torch.zeros(n, 3, dtype=torch.float64), atomic_numbers=[18] * n, energy=[[0.0]])
        for n in (1, 99)
    ]
    graphs = [graph.to(dtype=torch.float64) for graph in graphs]
    metrics = ErrorMetrics()
    metrics.update(
        {"energy": torch.tensor([[0.1], [9.9]], dtype=torch.float64)}, Batch.from_data_list(graphs)
    )
    assert metrics.compute()["energy_per_atom_mae"] == pytest.approx(0.1, rel=1e-12)


def test_batches_of_any_size_give_the_same_metrics():
    graphs = make_graphs() + make_graphs(1)
    options = {"per_element": True, "group_by": "config_type"}
    whole = accumulate([Batch.from_data_list(graphs)], **options)
    pieces = accumulate([Batch.from_data_list(graphs[i : i + 3]) for i in (0, 3, 6)], **options)
    assert whole.compute() == pytest.approx(pieces.compute(), rel=1e-12)
    assert whole.counts() == pieces.counts()


def test_merging_is_the_same_as_seeing_everything():
    first, second = (Batch.from_data_list(make_graphs(seed)) for seed in (0, 1))
    merged = accumulate([first], group_by="config_type")
    merged.merge(accumulate([second], group_by="config_type"))
    assert merged.compute() == pytest.approx(
        accumulate([first, second], group_by="config_type").compute(), rel=1e-12
    )


def test_merging_leaves_the_other_as_it_was():
    batch = Batch.from_data_list(make_graphs())
    other = accumulate([batch])
    before = other.compute()
    total = ErrorMetrics()
    total.merge(other)
    total.update(predict(batch), batch)
    assert other.compute() == before


def test_errors_by_element_and_by_group():
    batch = Batch.from_data_list(make_graphs())
    metrics = accumulate([batch], per_element=True, group_by="config_type").compute()
    error = (predict(batch)["forces"].double() - batch.forces.double()).abs()
    oxygen = batch.atomic_numbers == 8
    assert metrics["forces_mae/element=O"] == pytest.approx(error[oxygen].mean().item(), rel=1e-12)
    large = torch.tensor([n >= 3 for n in SIZES])
    expected = error[large[batch.batch_idx]].mean().item()
    assert metrics["forces_mae/config_type=large"] == pytest.approx(expected, rel=1e-12)
    stress_error = (predict(batch)["stress"].double() - batch.stress.double()).abs()
    assert metrics["stress_mae/config_type=large"] == pytest.approx(
        stress_error[large].mean().item(), rel=1e-12
    )
    assert "energy_per_atom_rmse/config_type=small" in metrics


def test_missing_labels_and_outputs_are_passed_over():
    batch = Batch.from_data_list(make_graphs())
    batch.energy[1] = float("nan")
    predictions = predict(batch)
    batch.remove_key("stress")
    del predictions["forces"]
    metrics = ErrorMetrics()
    metrics.update(predictions, batch)
    assert set(metrics.compute()) == {
        "energy_mae",
        "energy_rmse",
        "energy_per_atom_mae",
        "energy_per_atom_rmse",
    }
    assert metrics.counts() == {"energy": 3, "energy_per_atom": 3}
    assert all(np.isfinite(value) for value in metrics.compute().values())


def test_a_nan_prediction_shows():
    batch = Batch.from_data_list(make_graphs())
    metrics = ErrorMetrics()
    metrics.update({"energy": torch.full_like(batch.energy, float("nan"))}, batch)
    assert np.isnan(metrics.compute()["energy_mae"])


def test_half_precision_does_not_limit_the_running_sums():
    graph = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[18], energy=[[0.0]])
    batch = Batch.from_data_list([graph])
    metrics = ErrorMetrics()
    for _ in range(300):  # bfloat16 cannot count beyond 256
        metrics.update({"energy": torch.ones(1, 1, dtype=torch.bfloat16)}, batch)
    assert metrics.counts()["energy"] == 300
    assert metrics.compute()["energy_mae"] == 1.0


def test_other_names_of_labels_and_outputs():
    batch = Batch.from_data_list(make_graphs())
    batch.add_key("teacher_energy", batch.energy + 2, "system")
    metrics = ErrorMetrics(target_keys={"energy": "teacher_energy"}, prediction_keys={"energy": "student"})
    metrics.update({"student": batch.energy}, batch)
    assert metrics.compute()["energy_mae"] == pytest.approx(2.0, rel=1e-4)
    with pytest.raises(ValueError, match="dipole"):
        ErrorMetrics(target_keys={"dipole": "mu"})


def test_a_prediction_of_another_shape_is_refused():
    batch = Batch.from_data_list(make_graphs())
    with pytest.raises(ValueError, match=r"\[4\].*\[4, 1\]"):
        ErrorMetrics().update({"energy": batch.energy[:, 0]}, batch)


def test_nothing_seen_gives_no_metrics():
    metrics = accumulate([Batch.from_data_list(make_graphs())])
    metrics.reset()
    assert metrics.compute() == {}
