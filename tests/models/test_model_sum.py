import pytest
import torch

from nvalchemi.models import (
    DemoModelWrapper,
    LennardJonesModelWrapper,
    NeighborConfig,
    NeighborListFormat,
    PaiNN,
    SumModel,
    check_model,
)

COO, MATRIX = NeighborListFormat.COO, NeighborListFormat.MATRIX


def _argon(cutoff, **options):
    return LennardJonesModelWrapper(epsilon=0.01, sigma=2.2, cutoff=cutoff, switch_width=0.5, **options)


def _painn(cutoff):
    torch.manual_seed(int(cutoff * 10))
    return PaiNN(hidden_dim=8, num_layers=2, cutoff=cutoff).double().eval()


def _separately(models, structures, make_batch):
    outputs = [model(make_batch(structures, model)) for model in models]
    return {name: sum(output[name] for output in outputs) for name in outputs[0]}


MEMBERS = {
    "same format, two cutoffs": lambda: (_painn(4.0), _painn(6.0)),
    "matrix, two cutoffs": lambda: (_argon(6.0), _argon(3.5)),
    "matrix and list": lambda: (_argon(7.0), _painn(4.0)),
    "full and half list": lambda: (_argon(6.0), _argon(5.0, half_list=True)),
    "with and without list": lambda: (DemoModelWrapper().double().eval(), _argon(5.0)),
}


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_sum_equals_the_separate_evaluations(members, make_batch, crystals):
    models = members()
    total = models[0] + models[1]
    outputs = total(make_batch(crystals, total))
    expected = _separately(models, crystals, make_batch)
    assert set(outputs) == {"energy", "forces", "stress"}
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, rtol=1e-12, atol=1e-12)


def test_sums_nest(make_batch, crystals):
    models = (_painn(4.0), _argon(7.0), _argon(5.0, half_list=True), _painn(5.0))
    total = (models[0] + models[1]) + (models[2] + models[3])
    outputs = total(make_batch(crystals, total))
    for name, value in _separately(models, crystals, make_batch).items():
        torch.testing.assert_close(outputs[name], value, rtol=1e-12, atol=1e-12)


def test_shared_list_has_the_largest_cutoff_and_skin():
    first, second = _painn(4.0), _painn(6.0)
    first.set_config("neighbor_config", NeighborConfig(cutoff=4.0, skin=1.0))
    assert (first + second).model_config.neighbor_config == NeighborConfig(cutoff=6.0, skin=1.0)
    assert (_argon(9.0) + first).model_config.neighbor_config.format is COO
    assert (_argon(9.0) + DemoModelWrapper()).model_config.neighbor_config.format is MATRIX
    assert (DemoModelWrapper() + DemoModelWrapper()).model_config.neighbor_config is None


def test_batch_keeps_its_own_list(make_batch, crystals):
    total = _painn(4.0) + _argon(7.0) + _argon(6.0, half_list=True)
    batch = make_batch(crystals, total)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    total(batch)
    assert batch.keys() == tuple(before)
    assert all(torch.equal(batch[name], tensor) for name, tensor in before.items())


def test_conformance(make_batch, crystals):
    check_model(_argon(6.0) + _painn(4.0), make_batch(crystals))


def test_members_are_trained_through_the_sum(make_batch, crystals):
    total = _painn(4.0) + _argon(6.0)
    total.train()
    total(make_batch(crystals, total))["forces"].square().sum().backward()
    assert any(
        parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in total.parameters()
    )


@pytest.mark.parametrize("nested", [False, True])
def test_second_derivatives_through_the_sum(make_batch, crystals, nested):
    models = (_painn(4.0), _argon(6.0), _argon(5.0, half_list=True))
    total = models[0] + (models[1] + models[2]) if nested else SumModel(*models)
    total.set_config("gradient_keys", {"positions"})
    batch = make_batch(crystals, total)
    batch.positions.requires_grad_()
    (row,) = torch.autograd.grad(total(batch)["forces"][0, 0], batch.positions)
    step = torch.zeros_like(row)
    step[1, 2] = 1e-4
    forces = []
    for sign in (1, -1):
        moved = make_batch(crystals, total)
        moved.positions = batch.positions.detach() + sign * step
        forces.append(total(moved)["forces"][0, 0].item())
    assert row[1, 2].item() == pytest.approx((forces[0] - forces[1]) / 2e-4, rel=1e-5)
    assert abs(row[1, 2].item()) > 1e-3
    # Only while the sum is evaluated.
    assert all(not model.model_config.gradient_keys for model in models)
    assert not models[0](batch)["forces"].requires_grad


def test_stress_needs_every_member_and_missing_outputs_name_the_member(make_batch, crystals):
    silent = _painn(4.0)
    silent.set_config("active_outputs", {"energy"})
    total = silent + _argon(6.0)
    with pytest.raises(ValueError, match=r"PaiNN, a member of a sum, gave no '(forces|stress)'"):
        total(make_batch(crystals, total))
    total.set_config("active_outputs", {"energy"})
    assert set(total(make_batch(crystals, total))) == {"energy"}


def test_only_models_can_be_added():
    with pytest.raises(TypeError):
        _ = DemoModelWrapper() + 1.0
    with pytest.raises(ValueError, match="at least two"):
        SumModel(DemoModelWrapper())


def test_missing_list_is_reported(make_batch, crystals):
    with pytest.raises(ValueError, match="compute_neighbors"):
        (_painn(4.0) + _argon(5.0))(make_batch(crystals))
