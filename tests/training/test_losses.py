"""Losses: values, labels that are missing, precision, composition, schedules, specifications."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from nvalchemi.data import AtomicData, Batch
from nvalchemi.training.losses import (
    ComposedLoss,
    ConstantWeight,
    CosineWeight,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LinearWeight,
    LossTerm,
    PiecewiseWeight,
    StressHuberLoss,
    StressMSELoss,
    loss_from_spec,
)
from nvalchemi.training.losses.reductions import per_graph_mean, per_graph_sum

NAN = float("nan")
ENERGY = [EnergyMSELoss, EnergyMAELoss, EnergyHuberLoss]
FORCE = [ForceMSELoss, ForceL2NormLoss, ForceHuberLoss]
STRESS = [StressMSELoss, StressHuberLoss]
SHAPES = {"energy": (4, 1), "forces": (7, 3), "stress": (4, 3, 3)}
graph_of_atom = torch.tensor([0, 0, 1, 1, 1, 2, 3])
SIZES = torch.tensor([2, 3, 1, 1])
WAYS_TO_NAME_THE_GRAPHS = (
    {"batch_idx": graph_of_atom, "num_graphs": 4},
    {"batch_idx": graph_of_atom},
    {"batch_ptr": torch.tensor([0, 2, 5, 6, 7])},
    {"num_nodes_per_graph": SIZES},
)


def make_batch(**replaced) -> Batch:
    torch.manual_seed(3)
    fields = {name: torch.randn(shape) for name, shape in SHAPES.items()} | replaced
    nodes = fields["forces"].split(SIZES.tolist())
    graphs = [
        AtomicData(
            positions=torch.randn(n, 3),
            atomic_numbers=[18] * n,
            energy=fields["energy"][g : g + 1],
            forces=nodes[g],
            stress=fields["stress"][g : g + 1],
            system_id=torch.tensor([[10 + g]]),
        )
        for g, n in enumerate(SIZES.tolist())
    ]
    return Batch.from_data_list(graphs)


def random_pair(loss_cls, dtype=torch.float64):
    shape = SHAPES[loss_cls.quantity]
    return torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)


# ---------------------------------------------------------------------- values
@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        (EnergyMSELoss(), torch.nn.functional.mse_loss),
        (EnergyMAELoss(), torch.nn.functional.l1_loss),
        (EnergyHuberLoss(delta=0.3), lambda p, t: torch.nn.functional.huber_loss(p, t, delta=0.3)),
        (ForceMSELoss(), torch.nn.functional.mse_loss),
        (ForceL2NormLoss(), lambda p, t: (p - t).norm(dim=-1).mean()),
        (ForceHuberLoss(), torch.nn.functional.huber_loss),
        (StressMSELoss(), torch.nn.functional.mse_loss),
        (StressHuberLoss(delta=0.01), lambda p, t: torch.nn.functional.huber_loss(p, t, delta=0.01)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_default_value_is_the_plain_mean(loss, reference):
    pred, target = random_pair(type(loss))
    torch.testing.assert_close(loss(pred, target), reference(pred, target))


@pytest.mark.parametrize("loss_cls", ENERGY)
def test_per_atom_divides_the_error_before_the_penalty(loss_cls):
    pred, target = random_pair(loss_cls)
    expected = loss_cls()(pred / SIZES[:, None], target / SIZES[:, None])
    for fields in WAYS_TO_NAME_THE_GRAPHS:
        torch.testing.assert_close(loss_cls(per_atom=True)(pred, target, **fields), expected)


@pytest.mark.parametrize("loss_cls", FORCE)
def test_balanced_forces_average_graphs_after_atoms(loss_cls):
    pred, target = random_pair(loss_cls)
    graphs = [loss_cls()(pred[graph_of_atom == g], target[graph_of_atom == g]) for g in range(4)]
    for fields in WAYS_TO_NAME_THE_GRAPHS:
        torch.testing.assert_close(
            loss_cls(balanced=True)(pred, target, **fields), torch.stack(graphs).mean()
        )


def test_an_option_without_its_field_is_refused_by_name():
    pred, target = random_pair(ForceMSELoss)
    with pytest.raises(ValueError, match="batch_idx="):
        ForceMSELoss(balanced=True)(pred, target)
    with pytest.raises(ValueError, match="batch_idx="):
        EnergyMSELoss(per_atom=True)(torch.zeros(1, 1), torch.zeros(1, 1))


def test_fields_that_a_loss_does_not_need_are_accepted():
    batch = make_batch()
    fields = {name: batch[name] for name in ("positions", "atomic_numbers")}
    assert EnergyMSELoss()(batch.energy, batch.energy, batch_ptr=batch.batch_ptr, **fields) == 0


def test_norm_has_a_finite_gradient_at_zero_error():
    pred = torch.zeros(2, 3, requires_grad=True)
    ForceL2NormLoss()(pred, torch.zeros(2, 3)).backward()
    assert torch.equal(pred.grad, torch.zeros(2, 3))


# ---------------------------------------------------------------------- labels that are not there
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("loss_cls", ENERGY + FORCE + STRESS)
def test_masked_labels_give_the_value_and_gradient_of_the_others(loss_cls, bad):
    pred, target = random_pair(loss_cls)
    kept = torch.arange(len(target)) != 1
    expected = loss_cls()(pred[kept], target[kept])
    (expected_grad,) = torch.autograd.grad(expected, pred)
    target[1] = bad
    value = loss_cls(ignore_nonfinite=True)(pred, target)
    (grad,) = torch.autograd.grad(value, pred)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("loss_cls", ENERGY + FORCE + STRESS)
def test_masked_labels_have_a_finite_gradient_through_a_prediction_that_overflows(loss_cls):
    pred, target = random_pair(loss_cls)
    target[1] = NAN
    pred = pred.detach().clone()
    pred[1] = math.inf
    pred.requires_grad_()
    value = loss_cls(ignore_nonfinite=True)(pred, target)
    value.backward()
    assert value.isfinite()
    assert torch.equal(pred.grad[1], torch.zeros_like(pred.grad[1]))


@pytest.mark.parametrize("loss_cls", ENERGY + FORCE + STRESS)
def test_no_label_at_all_gives_zero_and_zero_gradient(loss_cls):
    pred, target = random_pair(loss_cls)
    value = loss_cls(ignore_nonfinite=True)(pred, torch.full_like(target, NAN))
    value.backward()
    assert value == 0
    assert torch.equal(pred.grad, torch.zeros_like(pred))


@pytest.mark.parametrize("loss_cls", ENERGY + FORCE + STRESS)
def test_a_nan_label_is_not_hidden_without_being_asked(loss_cls):
    pred, target = random_pair(loss_cls)
    target[1] = NAN
    assert loss_cls()(pred, target).isnan()


@pytest.mark.parametrize("loss_cls", ENERGY + FORCE + STRESS)
def test_a_nan_prediction_is_never_hidden(loss_cls):
    pred, target = random_pair(loss_cls)
    assert loss_cls(ignore_nonfinite=True)(torch.full_like(pred, NAN), target).isnan()


def test_one_missing_component_leaves_the_others_in_the_mean():
    value = ForceMSELoss(ignore_nonfinite=True)(torch.zeros(1, 3), torch.tensor([[1.0, NAN, 3.0]]))
    assert value == 5.0


def test_balanced_forces_average_over_labelled_graphs_only():
    target = torch.ones(7, 3)
    target[graph_of_atom == 1] = NAN
    loss = ForceMSELoss(balanced=True, ignore_nonfinite=True)
    assert loss(torch.zeros(7, 3), target, batch_idx=graph_of_atom, num_graphs=4) == 1.0


@given(mask=st.lists(st.booleans(), min_size=7, max_size=7), balanced=st.booleans())
@settings(max_examples=30, deadline=None)
def test_what_stands_under_a_mask_never_matters(mask, balanced):
    target = torch.linspace(-1, 1, 21).reshape(7, 3)
    target[torch.tensor(mask)] = NAN
    grads = []
    for fill in (0.0, 1e30):
        pred = torch.zeros(7, 3)
        pred[torch.tensor(mask)] = fill
        pred.requires_grad_()
        loss = ForceMSELoss(ignore_nonfinite=True, balanced=balanced)
        loss(pred, target, batch_idx=graph_of_atom, num_graphs=4).backward()
        grads.append(pred.grad)
    assert torch.equal(*grads)


# ---------------------------------------------------------------------- precision
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_sum_of_64_squares_of_40_in_half_precision_is_1600(half):
    pred, target = torch.full((64, 1), 40.0, dtype=half), torch.zeros(64, 1, dtype=half)
    value = EnergyMSELoss()(pred, target)
    assert value.dtype == torch.float32
    assert value == 1600.0


@pytest.mark.parametrize("loss_cls", ENERGY + FORCE + STRESS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_predictions_are_cast_up_to_the_label(loss_cls, dtype, half):
    pred, target = random_pair(loss_cls, dtype)
    value = loss_cls()(pred.to(half), target)
    assert value.dtype == dtype
    assert torch.equal(value, loss_cls()(pred.to(half).to(dtype), target))


def test_predictions_are_never_cast_down_to_a_half_precision_label():
    pred, target = torch.full((1, 1), 1 + 2**-20), torch.ones(1, 1, dtype=torch.float16)
    assert EnergyMAELoss()(pred, target).item() == 2**-20


def test_float32_against_float64_is_an_error_with_both_named():
    with pytest.raises(ValueError, match=r"float32.*float64"):
        EnergyMSELoss()(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(4,), (1, 1), (4, 4)])
def test_shapes_that_would_broadcast_are_refused(shape):
    with pytest.raises(ValueError, match=r"\[4, 1\]"):
        EnergyMSELoss()(torch.zeros(shape), torch.zeros(4, 1))


def test_reductions_accumulate_half_precision_in_float32():
    values = torch.full((4096, 2), 1.0, dtype=torch.bfloat16)  # bfloat16 cannot count beyond 256
    index = torch.zeros(4096, dtype=torch.int64)
    assert per_graph_sum(values, index, 2).tolist() == [[4096.0, 4096.0], [0.0, 0.0]]
    assert per_graph_mean(values, index, 2).tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert per_graph_sum(values.double(), index, 1).dtype == torch.float64


# ---------------------------------------------------------------------- composition
def predictions_for(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(batch[name]).requires_grad_() for name in SHAPES}


def test_total_is_the_weighted_sum_of_the_components():
    batch = make_batch()
    predictions = predictions_for(batch)
    output = (EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss() + StressHuberLoss() * 0.5)(
        predictions, batch
    )
    energy = (batch.energy / batch.num_nodes_per_graph[:, None]).square().mean()
    torch.testing.assert_close(output.unweighted["energy_mse"], energy)
    torch.testing.assert_close(output.components["forces_mse"], 10 * batch.forces.square().mean())
    torch.testing.assert_close(output.total, sum(output.components.values()))
    assert list(output.components) == list(output.unweighted) == ["energy_mse", "forces_mse", "stress_huber"]
    assert output.total.ndim == 0


def test_per_sample_is_each_graph_alone():
    batch = make_batch()
    loss_fn = EnergyMAELoss() + ForceL2NormLoss() + StressMSELoss()
    output = loss_fn(predictions_for(batch), batch)
    for g, data in enumerate(batch.to_data_list()):
        alone = Batch.from_data_list([data])
        single = loss_fn(predictions_for(alone), alone)
        for name, value in single.unweighted.items():
            torch.testing.assert_close(output.per_sample[name][g], value.detach())


def test_a_single_term_is_a_loss_function_too():
    batch = make_batch()
    output = (3.0 * EnergyMSELoss())(predictions_for(batch), batch)
    torch.testing.assert_close(output.total, 3 * batch.energy.square().mean())
    with pytest.raises(TypeError, match="Batch"):
        EnergyMSELoss()(torch.zeros(1, 1), batch)


def test_factors_multiply_and_distribute():
    loss = 2.0 * (3.0 * EnergyMSELoss() + ForceMSELoss())
    assert [term.weight(0, 0) for term in loss.terms] == [6.0, 2.0]
    assert len(sum([EnergyMSELoss(), ForceMSELoss(), StressMSELoss()]).terms) == 3
    with pytest.raises(ValueError, match="finite"):
        NAN * EnergyMSELoss()


def test_terms_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="energy_mse"):
        EnergyMSELoss() + EnergyMSELoss()
    both = EnergyMSELoss() + EnergyMSELoss(target_key="teacher_energy")
    assert both.required_targets == {"energy", "teacher_energy"}


def test_keys_choose_label_and_prediction():
    batch = make_batch()
    batch.add_key("teacher_energy", batch.energy + 1, "system")
    loss = EnergyMAELoss(target_key="teacher_energy", prediction_key="student_energy") + ForceMSELoss()
    assert loss.required_predictions == {"student_energy", "forces"}
    output = loss({"student_energy": batch.energy, "forces": batch.forces}, batch)
    torch.testing.assert_close(output.unweighted["teacher_energy_mae"], torch.tensor(1.0))


def test_a_missing_label_names_field_and_graphs():
    batch = make_batch()
    batch.remove_key("stress")
    with pytest.raises(
        ValueError, match=r"StressMSELoss.*'stress'.*graph 0 \(system_id 10\).*it has|the batch has"
    ):
        StressMSELoss()({"stress": torch.zeros(4, 3, 3)}, batch)


def test_a_missing_prediction_names_it_and_what_there_is():
    with pytest.raises(ValueError, match=r"'forces'.*gave energy"):
        (EnergyMSELoss() + ForceMSELoss())({"energy": torch.zeros(4, 1)}, make_batch())


def test_explanation_names_component_graph_and_cause():
    batch = make_batch()
    predictions = predictions_for(batch)
    loss_fn = EnergyMSELoss() + ForceMSELoss()
    assert loss_fn.explain(predictions, batch) is None
    batch.energy[2] = NAN
    predictions["forces"] = predictions["forces"].detach().index_fill(0, torch.tensor([6]), math.inf)
    explained = loss_fn.explain(predictions, batch)
    assert "energy_mse: graph 2 (system_id 12) (the label 'energy' is not finite)" in explained
    assert "forces_mse: graph 3 (system_id 13) (the prediction 'forces' is not finite)" in explained
    assert "graph 0" not in explained


def test_a_term_of_weight_zero_does_not_bring_in_its_nan():
    batch = make_batch(stress=torch.full((4, 3, 3), NAN))
    predictions = predictions_for(batch)
    output = (EnergyMSELoss() + 0.0 * StressMSELoss())(predictions, batch)
    output.total.backward()
    assert output.total.isfinite()
    assert predictions["energy"].grad.isfinite().all()


# ---------------------------------------------------------------------- schedules and specifications
def test_weights_follow_step_and_epoch():
    ramp = LinearWeight(start=1.0, end=3.0, length=10, delay=5)
    assert [ramp(step, 0) for step in (0, 5, 10, 15, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    cosine = CosineWeight(start=0.0, end=1.0, length=2, unit="epoch")
    assert [round(cosine(99, epoch), 12) for epoch in (0, 1, 2)] == [0.0, 0.5, 1.0]
    pieces = PiecewiseWeight(boundaries=(2, 4), values=(1, 2, 3))
    assert [pieces(step, 0) for step in range(6)] == [1, 1, 2, 2, 3, 3]


def test_a_schedule_is_applied_by_the_loss_function():
    batch = make_batch()
    loss_fn = EnergyMSELoss() + LinearWeight(start=0.0, end=10.0, length=10) * (2.0 * ForceMSELoss())
    early, late = (loss_fn(predictions_for(batch), batch, step=step) for step in (1, 100))
    torch.testing.assert_close(late.components["forces_mse"], 20 * late.unweighted["forces_mse"])
    torch.testing.assert_close(early.components["forces_mse"], 2 * late.unweighted["forces_mse"])


def test_two_schedules_on_one_term_are_refused():
    ramp = LinearWeight(start=1.0, end=2.0, length=3)
    with pytest.raises(TypeError, match="schedule already"):
        ramp * (ramp * EnergyMSELoss())


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearWeight(start=1.0, end=2.0, length=0),
        lambda: CosineWeight(start=1.0, end=NAN, length=4),
        lambda: PiecewiseWeight(boundaries=(3,), values=(1.0,)),
        lambda: PiecewiseWeight(boundaries=(3, 3), values=(1.0, 2.0, 3.0)),
        lambda: EnergyHuberLoss(delta=0.0),
        lambda: EnergyMSELoss(ignore_nan=True),
    ],
)
def test_bad_options_are_refused(make):
    with pytest.raises(ValidationError):
        make()


def test_a_loss_survives_json():
    loss = (
        EnergyHuberLoss(delta=0.01, per_atom=True)
        + LinearWeight(start=1.0, end=9.0, length=50) * ForceL2NormLoss(balanced=True, ignore_nonfinite=True)
        + PiecewiseWeight(boundaries=(3,), values=(0.0, 1.0), unit="epoch") * StressMSELoss(name="stress")
    )
    assert loss_from_spec(json.loads(json.dumps(loss.to_spec()))) == loss
    assert ComposedLoss.from_spec(loss.to_spec()) == loss
    term = EnergyMSELoss(weight=ConstantWeight(3.0))
    assert term == EnergyMSELoss(weight=3.0)
    assert loss_from_spec(term.to_spec()) == term
    assert EnergyMSELoss.from_spec(term.to_spec()) == term


def test_a_pydantic_field_takes_a_loss_or_its_specification():
    from nvalchemi.training.losses import LossFunction

    class Holder(BaseModel):
        loss_fn: LossFunction

    for loss in (2.0 * EnergyMSELoss(), EnergyMSELoss() + ForceMSELoss()):
        assert Holder.model_validate(Holder(loss_fn=loss).model_dump(mode="json")).loss_fn == loss


def test_an_unknown_loss_in_a_specification_is_named():
    with pytest.raises(ValueError, match="'EnergyCubeLoss'"):
        loss_from_spec({"type": "EnergyCubeLoss"})


def test_a_loss_of_ones_own_composes_and_is_written_like_the_others():
    class DipoleLogCoshLoss(LossTerm):
        quantity = "dipole"
        level = "system"
        kind = "logcosh"

        def penalty(self, residual):
            return torch.log(torch.cosh(residual))

    loss = 2.0 * DipoleLogCoshLoss() + EnergyMSELoss()
    assert loss.required_targets == {"dipole", "energy"}
    assert loss_from_spec(loss.to_spec()) == loss
    value = DipoleLogCoshLoss()(torch.ones(1, 3), torch.zeros(1, 3))
    assert value.item() == pytest.approx(math.log(math.cosh(1.0)))
