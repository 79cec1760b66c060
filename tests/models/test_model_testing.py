"""The conformance test finds each fault it is made for."""

import pytest
import torch

from nvalchemi.models import DemoModelWrapper, LennardJonesModelWrapper, PaiNN, check_model


def _faulty(change):
    class Faulty(LennardJonesModelWrapper):
        def forward(self, data):
            return change(self, data, super().forward(data))

    return Faulty(epsilon=0.01, sigma=2.2, cutoff=6.0, switch_width=1.0)


def _write_into_batch(model, data, outputs):
    data.positions.add_(0.01)
    return outputs


def _depend_on_the_batch(model, data, outputs):
    return outputs | {"energy": outputs["energy"] + 1e-6 * data.num_graphs}


def _leave_training_mode(model, data, outputs):
    model.eval()
    return outputs


FAULTS = {
    "outputs": [
        lambda model, data, outputs: outputs | {"energy": outputs["energy"].squeeze(1)},
        lambda model, data, outputs: outputs | {"forces": outputs["forces"].float()},
        lambda model, data, outputs: outputs | {"energy": outputs["energy"] / 0},
        _write_into_batch,
    ],
    "graph": [lambda model, data, outputs: outputs | {"energy": outputs["energy"].clone().requires_grad_()}],
    "mode": [_leave_training_mode],
    "singles": [_depend_on_the_batch],
    "forces": [lambda model, data, outputs: outputs | {"forces": 1.0001 * outputs["forces"]}],
    "stress": [
        lambda model, data, outputs: outputs | {"stress": -outputs["stress"]},
        lambda model, data, outputs: outputs | {"stress": outputs["stress"] + torch.eye(3)[[1, 2, 0]]},
    ],
    "permutation": [lambda model, data, outputs: outputs | {"forces": outputs["forces"].cumsum(0)}],
    "supercell": [
        lambda model, data, outputs: (
            outputs | {"energy": outputs["energy"] / data.num_nodes_per_graph[:, None]}
        )
    ],
}


@pytest.mark.parametrize(
    ("check", "fault"), [(check, fault) for check, faults in FAULTS.items() for fault in faults]
)
def test_fault_is_found_and_named(check, fault, make_batch, crystals):
    others = {
        "outputs",
        "graph",
        "mode",
        "singles",
        "forces",
        "stress",
        "permutation",
        "translation",
        "rotation",
    }
    with pytest.raises(AssertionError, match=f"Faulty fails the check '{check}'"):
        check_model(_faulty(fault), make_batch(crystals), skip=(others | {"supercell", "training"}) - {check})


@pytest.mark.parametrize("check", ["translation", "rotation", "supercell"])
def test_model_that_is_not_invariant_is_found(check, make_batch, crystals):
    with pytest.raises(AssertionError, match=f"DemoModelWrapper fails the check '{check}'"):
        check_model(
            DemoModelWrapper().double(),
            make_batch(crystals),
            skip={"translation", "rotation", "supercell"} - {check},
        )


def test_detached_training_output_is_found(make_batch, crystals):
    class Detached(PaiNN):
        def forward(self, data):
            return {name: value.detach() for name, value in super().forward(data).items()}

    model = Detached(hidden_dim=8, num_layers=1, cutoff=4.0).double()
    with pytest.raises(
        AssertionError, match="check 'training': energy in training mode does not depend on the parameters"
    ):
        check_model(model, make_batch(crystals))


@pytest.mark.parametrize("kind", ["crystals", "molecules"])
def test_correct_models_pass(kind, make_batch, request):
    batch = make_batch(request.getfixturevalue(kind))
    check_model(LennardJonesModelWrapper(epsilon=0.01, sigma=2.2, cutoff=6.0, switch_width=1.0), batch)
    check_model(PaiNN(hidden_dim=8, num_layers=2, cutoff=4.0).double(), batch)


def test_model_without_invariance_passes_the_other_checks(make_batch, crystals):
    skip = {"translation", "rotation", "supercell"}
    check_model(DemoModelWrapper().double(), make_batch(crystals), skip=skip)
    check_model(DemoModelWrapper(), make_batch(crystals, dtype=torch.float32), skip=skip)


def test_unknown_check_is_refused(make_batch, crystals):
    with pytest.raises(ValueError, match=r"unknown checks \['charge'\]"):
        check_model(DemoModelWrapper(), make_batch(crystals), skip={"charge"})
