"""What a loss term is, how terms add up, and what a loss returns."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast, overload

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    model_serializer,
    model_validator,
)
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.models.derivatives import first_without_volume, graph_periodicity
from nvalchemi.training.losses.reductions import per_graph_sum
from nvalchemi.training.losses.schedules import ConstantWeight, Schedule, Weight

__all__ = ["ComposedLoss", "LossFunction", "LossOutput", "LossTerm", "loss_from_spec"]

_terms: dict[str, type["LossTerm"]] = {}


class Evaluated(NamedTuple):
    """One term for one batch."""

    value: Tensor
    """Scalar."""
    penalties: Tensor
    """Detached penalties [N, …] or [B, …], 0 where there is no label."""
    labelled: Tensor | None
    """Which of them have a label; ``None``: all."""


@dataclass
class LossOutput:
    """Result of a loss function.

    Attributes
    ----------
    total : Tensor
        Weighted sum of the components, the scalar to differentiate.
    components : dict of str to Tensor
        Weighted components by name.
    """

    total: Tensor
    components: dict[str, Tensor]
    _terms: "dict[str, tuple[LossTerm, Evaluated]]" = field(repr=False)
    _batch: Batch = field(repr=False)

    @property
    def unweighted(self) -> dict[str, Tensor]:
        """Components before weighting."""
        return {name: evaluated.value for name, (_, evaluated) in self._terms.items()}

    @cached_property
    def per_sample(self) -> dict[str, Tensor]:
        """Unweighted components of each graph, [B], without gradient; 0 for a graph without a label.

        Computed when first asked for, so that a training loop that does not look at it does not pay for it.
        """
        with torch.no_grad():
            return {name: self._means(*entry) for name, entry in self._terms.items()}

    @cached_property
    def counts(self) -> dict[str, int | Tensor]:
        """How many labels (or graphs) each component is the mean over, to weight batches by."""
        fields = _FieldsOf(self._batch)
        return {
            name: term.count(evaluated.penalties, evaluated.labelled, fields)
            for name, (term, evaluated) in self._terms.items()
        }

    @cached_property
    def labelled_graphs(self) -> dict[str, int]:
        """Number of graphs in which each component has a label."""
        return {name: self._labelled_graphs(*entry) for name, entry in self._terms.items()}

    def _labelled_graphs(self, term: "LossTerm", evaluated: Evaluated) -> int:
        if evaluated.labelled is None:
            return self._batch.num_graphs
        _, count = term.sums_per_graph(
            evaluated.penalties, evaluated.labelled, self._batch.batch_idx, self._batch.num_graphs
        )
        return int((count > 0).sum())

    def _means(self, term: "LossTerm", evaluated: Evaluated) -> Tensor:
        total, count = term.sums_per_graph(
            evaluated.penalties, evaluated.labelled, self._batch.batch_idx, self._batch.num_graphs
        )
        return total / count.clamp(min=1)


class _FieldsOf(Mapping[str, Any]):
    """What a batch knows of its structures, each worked out only for a term that asks for it."""

    _NAMES = ("batch_idx", "batch_ptr", "num_graphs", "num_nodes_per_graph")

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __getitem__(self, name: str) -> Any:
        return getattr(self._batch, name) if name in self._NAMES else self._batch[name]

    def __contains__(self, name: object) -> bool:
        return name in self._NAMES or name in self._batch

    def __iter__(self) -> Iterator[str]:
        return iter((*self._NAMES, *self._batch.keys()))

    def __len__(self) -> int:
        return len(self._NAMES) + len(self._batch.keys())


class _Composable:
    """``+`` and ``*`` of loss terms and of their sums."""

    def _as_terms(self) -> "tuple[LossTerm, ...]":
        raise NotImplementedError

    def __add__(self, other: Any) -> "ComposedLoss":
        if not isinstance(other, _Composable):
            return NotImplemented
        return ComposedLoss(terms=self._as_terms() + other._as_terms())

    def __radd__(self, other: Any) -> "ComposedLoss":
        # sum() of a list begins with 0.
        return ComposedLoss(terms=self._as_terms()) if other == 0 else NotImplemented


class LossTerm(BaseModel, _Composable, ABC):
    """Base of the loss terms: a penalty on the difference between one prediction and its label.

    A term is called as ``term(pred, target, **fields_of_the_batch)`` and returns a scalar; called as
    ``term(predictions, batch, step=…, epoch=…)`` it is a loss function of its own (see :class:`ComposedLoss`).
    Differences are taken and summed in the dtype of the label, and in float32 at least: predictions in half precision
    are cast up.

    A subclass names its ``quantity`` and ``level`` and defines :meth:`penalty`.

    Parameters
    ----------
    target_key : str
        Field of the batch that holds the label; by default the quantity's name (``"energy"``, ``"forces"``,
        ``"stress"``).
    prediction_key : str
        Output of the model, by default also the quantity's name.
    ignore_nonfinite : bool, default False
        Leave out labels that are NaN or infinite; the mean is over the others. They add neither to the value nor to the
        gradient. By default such a label makes the loss NaN. Predictions that are not finite always count.
    weight : schedule or float, default 1
        Factor of the term in a loss function; ``10.0 * term`` sets it too. Not applied in ``term(pred, target)``.
    name : str
        Name of the component, by default made of ``target_key`` and the kind of loss (``"forces_mse"``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    quantity: ClassVar[str]
    level: ClassVar[Literal["system", "node"]]
    kind: ClassVar[str]

    target_key: str = ""
    prediction_key: str = ""
    ignore_nonfinite: bool = False
    weight: Weight = Field(default_factory=ConstantWeight)
    name: str = ""

    # ------------------------------------------------------------------ making, writing, reading
    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Make the class known to :func:`loss_from_spec`."""
        super().__pydantic_init_subclass__(**kwargs)
        _terms[cls.__name__] = cls

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        kind = given.pop("type", cls.__name__)
        if kind != cls.__name__:
            raise ValueError(f"this is the specification of a {kind}, not of a {cls.__name__}")
        given["target_key"] = given.get("target_key") or cls.quantity
        given["prediction_key"] = given.get("prediction_key") or cls.quantity
        given["name"] = given.get("name") or f"{given['target_key']}_{cls.kind}"
        return given

    @model_serializer(mode="wrap")
    def _serialize(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {"type": type(self).__name__, **handler(self)}

    def to_spec(self) -> dict[str, Any]:
        """Dictionary of plain values that :func:`loss_from_spec` reads."""
        return self.model_dump(mode="json")

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """The term that :meth:`to_spec` described."""
        return cls.model_validate(spec)

    def _as_terms(self) -> "tuple[LossTerm, ...]":
        return (self,)

    def __mul__(self, factor: "float | Schedule") -> "LossTerm":
        if isinstance(factor, int | float):
            return self.model_copy(update={"weight": self.weight.scaled(_finite(factor))})
        if isinstance(factor, Schedule):
            if not isinstance(self.weight, ConstantWeight):
                raise TypeError(f"{self.name} has a weight schedule already: {self.weight}")
            return self.model_copy(update={"weight": factor.scaled(self.weight.value)})
        return NotImplemented

    __rmul__ = __mul__

    # ------------------------------------------------------------------ to be defined
    @abstractmethod
    def penalty(self, residual: Tensor) -> Tensor:
        """Penalty of each residual, elementwise or reduced over its last dimension; 0 for a residual of 0."""

    def scale_residual(self, residual: Tensor, fields: Mapping[str, Any]) -> Tensor:
        """Residual that is penalised; energies per atom divide here."""
        return residual

    def average(self, penalties: Tensor, labelled: Tensor | None, fields: Mapping[str, Any]) -> Tensor:
        """Scalar of all penalties: the mean over those that have a label, 0 when none has."""
        if labelled is None:
            return penalties.mean()
        return penalties.sum() / labelled.sum().clamp(min=1)

    def count(self, penalties: Tensor, labelled: Tensor | None, fields: Mapping[str, Any]) -> int | Tensor:
        """What :meth:`average` divides by, 0 when nothing has a label; a subclass that averages otherwise says so here.

        Means of several batches weighted by it are the mean of the one big batch.
        """
        return penalties.numel() if labelled is None else labelled.sum()

    # ------------------------------------------------------------------ evaluation
    @overload
    def __call__(self, pred: Tensor, target: Tensor, **fields: Any) -> Tensor: ...
    @overload
    def __call__(
        self, pred: Mapping[str, Tensor], target: Batch, *, step: int = 0, epoch: int = 0
    ) -> LossOutput: ...
    def __call__(
        self, pred: Tensor | Mapping[str, Tensor], target: Tensor | Batch, **fields: Any
    ) -> Tensor | LossOutput:
        """Value for one prediction and its label, or output for all predictions and their batch.

        Raises
        ------
        ValueError
            Shapes or dtypes that do not fit, an option that needs a field which is not given, a missing prediction or
            label.
        """
        if isinstance(pred, Tensor) and isinstance(target, Tensor):
            return self.evaluate(pred, target, fields).value
        if isinstance(pred, Mapping) and isinstance(target, Batch):
            return ComposedLoss(terms=(self,))(pred, target, **fields)
        raise TypeError(
            f"{type(self).__name__} takes two tensors, or a mapping of predictions and a Batch; "
            f"got {type(pred).__name__} and {type(target).__name__}"
        )

    def evaluate(self, pred: Tensor, target: Tensor, fields: Mapping[str, Any]) -> Evaluated:
        """Value and penalties; ``fields`` are those of the batch (``batch_idx``, ``num_nodes_per_graph``, …)."""
        dtype = self._common_dtype(pred, target)
        pred, target = _cast(pred, dtype), _cast(target, dtype)
        labelled = target.isfinite() if self.ignore_nonfinite else None
        if labelled is None:
            residual = pred - target
        else:
            # The inner where keeps NaN out of the difference, the outer one out of the gradient: 0 · NaN is NaN.
            residual = torch.where(labelled, pred - torch.where(labelled, target, 0), 0)
        penalties = self.penalty(self.scale_residual(residual, fields))
        if labelled is not None and penalties.ndim < labelled.ndim:
            labelled = labelled.all(-1)
            penalties = torch.where(labelled, penalties, 0)
        return Evaluated(self.average(penalties, labelled, fields), penalties.detach(), labelled)

    def sums_per_graph(
        self, penalties: Tensor, labelled: Tensor | None, batch_idx: Tensor, num_graphs: int
    ) -> tuple[Tensor, Tensor]:
        """Sum of the penalties of each graph and number of labels in it, [B] each."""
        count = torch.ones_like(penalties) if labelled is None else labelled.to(penalties.dtype)
        total, count = (
            values.flatten(1).sum(1) if values.ndim > 1 else values for values in (penalties, count)
        )
        if self.level == "node":
            total, count = (per_graph_sum(values, batch_idx, num_graphs) for values in (total, count))
        return total, count

    def _common_dtype(self, pred: Tensor, target: Tensor) -> torch.dtype:
        if pred.shape != target.shape:
            raise ValueError(
                f"{type(self).__name__}: the prediction {self.prediction_key!r} has shape {list(pred.shape)}, "
                f"the label {self.target_key!r} has {list(target.shape)}"
            )
        if pred.dtype is target.dtype and pred.dtype in (torch.float32, torch.float64):
            return pred.dtype
        full = {dtype for dtype in (pred.dtype, target.dtype) if dtype not in (torch.float16, torch.bfloat16)}
        if len(full) > 1 or not (pred.is_floating_point() and target.is_floating_point()):
            raise ValueError(
                f"{type(self).__name__}: the prediction {self.prediction_key!r} is {pred.dtype} and the label "
                f"{self.target_key!r} is {target.dtype}; only half precision is cast up: give the batch the dtype of "
                "the model's output with batch.to(dtype=…)"
            )
        return full.pop() if full else torch.float32


def _term_from_spec(value: Any) -> Any:
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind not in _terms:
            raise ValueError(f"unknown loss {kind!r}; known are {', '.join(sorted(_terms))}")
        return _terms[kind].model_validate(value)
    return value


class ComposedLoss(BaseModel, _Composable):
    """Weighted sum of loss terms: ``EnergyMSELoss() + 10.0 * ForceMSELoss()``.

    Parameters
    ----------
    terms : tuple of LossTerm
        The terms; names must differ.

    Examples
    --------
    >>> from nvalchemi.data import AtomicData
    >>> from nvalchemi.training.losses import EnergyMSELoss, ForceMSELoss
    >>> loss_fn = EnergyMSELoss() + 10.0 * ForceMSELoss()
    >>> sorted(loss_fn.required_targets)
    ['energy', 'forces']
    >>> data = AtomicData(positions=[[0.0, 0, 0]], atomic_numbers=[18], energy=[[1.0]], forces=[[0.0, 0, 0]])
    >>> predictions = {"energy": torch.tensor([[3.0]]), "forces": torch.tensor([[1.0, 1.0, 1.0]])}
    >>> output = loss_fn(predictions, Batch.from_data_list([data]))
    >>> output.total.item(), {name: value.item() for name, value in output.components.items()}
    (14.0, {'energy_mse': 4.0, 'forces_mse': 10.0})
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    terms: tuple[SerializeAsAny[Annotated[LossTerm, BeforeValidator(_term_from_spec)]], ...] = Field(
        min_length=1
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_type(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if k != "type"} if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [term.name for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two loss terms are named {name!r}: give one of them another name=")
        return self

    @model_serializer(mode="wrap")
    def _serialize(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {"type": "ComposedLoss", **handler(self)}

    def to_spec(self) -> dict[str, Any]:
        """Dictionary of plain values that :func:`loss_from_spec` reads."""
        return self.model_dump(mode="json")

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """The loss that :meth:`to_spec` described."""
        return cls.model_validate(spec)

    def _as_terms(self) -> tuple[LossTerm, ...]:
        return self.terms

    def __mul__(self, factor: "float | Schedule") -> "ComposedLoss":
        if not isinstance(factor, int | float | Schedule):
            return NotImplemented
        return ComposedLoss(terms=tuple(term * factor for term in self.terms))

    __rmul__ = __mul__

    @property
    def required_targets(self) -> set[str]:
        """Fields a batch must have."""
        return {term.target_key for term in self.terms}

    @property
    def required_predictions(self) -> set[str]:
        """Outputs the model must give."""
        return {term.prediction_key for term in self.terms}

    def __call__(
        self, predictions: Mapping[str, Tensor], batch: Batch, *, step: int = 0, epoch: int = 0
    ) -> LossOutput:
        """Evaluate all terms.

        Parameters
        ----------
        predictions : mapping of str to Tensor
            What the model gave.
        batch : Batch
            The structures with their labels.
        step, epoch : int, default 0
            Where weight schedules stand.

        Raises
        ------
        ValueError
            A missing label or prediction; shapes or dtypes that do not fit.
        """
        self.check(predictions, batch)
        fields = _FieldsOf(batch)
        evaluated: dict[str, tuple[LossTerm, Evaluated]] = {}
        components: dict[str, Tensor] = {}
        total: Tensor | None = None
        for term in self.terms:
            result = term.evaluate(predictions[term.prediction_key], batch[term.target_key], fields)
            component = _weighted(result.value, term.weight(step, epoch))
            evaluated[term.name], components[term.name] = (term, result), component
            total = component if total is None else total + component
        return LossOutput(cast(Tensor, total), components, evaluated, batch)

    def check(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Refuse a batch without a label, or predictions without an output, that some term needs."""
        self.check_labels(batch)
        for term in self.terms:
            if term.prediction_key not in predictions:
                raise ValueError(
                    f"{type(term).__name__} needs the prediction {term.prediction_key!r}, which the model did not "
                    f"give; it gave {', '.join(predictions) or 'nothing'}"
                    + (_why_no_stress(batch) if term.quantity == "stress" else "")
                )

    def check_labels(self, batch: Batch) -> None:
        """Refuse a batch without a label that some term needs."""
        for term in self.terms:
            if term.target_key not in batch:
                raise ValueError(
                    f"{type(term).__name__} needs the label {term.target_key!r}, missing in {_graphs(batch)}; "
                    f"the batch has {', '.join(batch.keys())}"
                )

    def explain(self, predictions: Mapping[str, Tensor], batch: Batch) -> str | None:
        """Say which components are not finite, for which graphs and why; ``None`` when all are finite.

        >>> from nvalchemi.data import AtomicData
        >>> from nvalchemi.training.losses import EnergyMSELoss
        >>> data = [
        ...     AtomicData(positions=[[0.0, 0, 0]], atomic_numbers=[18], energy=[[e]])
        ...     for e in (1.0, math.nan)
        ... ]
        >>> loss_fn = ComposedLoss(terms=(EnergyMSELoss(),))
        >>> print(loss_fn.explain({"energy": torch.zeros(2, 1)}, Batch.from_data_list(data)))
        energy_mse: graph 1 (the label 'energy' is not finite)
        """
        with torch.no_grad():
            output = self(predictions, batch)
        reasons: list[str] = []
        for term in self.terms:
            bad = (~output.per_sample[term.name].isfinite()).nonzero().squeeze(-1).tolist()
            if not bad:
                continue
            sources = {
                f"the label {term.target_key!r} is not finite": batch[term.target_key],
                f"the prediction {term.prediction_key!r} is not finite": predictions[term.prediction_key],
            }
            for graph in bad[:8]:
                rows = batch.batch_idx == graph if term.level == "node" else graph
                causes = [
                    cause for cause, values in sources.items() if not bool(values[rows].isfinite().all())
                ]
                why = " and ".join(causes) or "the penalty overflows"
                reasons.append(f"{term.name}: {batch.describe_graph(graph)} ({why})")
            if len(bad) > 8:
                reasons.append(f"{term.name}: {len(bad) - 8} more graphs")
        return "; ".join(reasons) or None


def loss_from_spec(spec: Any) -> Any:
    """The loss that ``to_spec`` described; a loss passes through, so this can stand before a pydantic field.

    >>> from nvalchemi.training.losses import EnergyHuberLoss
    >>> loss = 2.0 * EnergyHuberLoss(delta=0.01)
    >>> loss_from_spec(loss.to_spec()) == loss
    True
    """
    if isinstance(spec, Mapping) and spec.get("type") == "ComposedLoss":
        return ComposedLoss.from_spec(spec)
    return _term_from_spec(spec)


LossFunction = Annotated[SerializeAsAny[LossTerm] | ComposedLoss, BeforeValidator(loss_from_spec)]
"""Type of a pydantic field that takes a loss or its specification."""


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    # A cast that does nothing still costs a call.
    return values if values.dtype is dtype else values.to(dtype)


def _weighted(value: Tensor, weight: float) -> Tensor:
    if weight == 1:
        return value
    # A term that is switched off must not bring in its NaN: 0 · NaN is NaN.
    return value * weight if weight != 0 else torch.zeros_like(value)


def _finite(factor: float) -> float:
    if not math.isfinite(factor):
        raise ValueError(f"the weight of a loss must be finite, got {factor}")
    return float(factor)


def _graphs(batch: Batch) -> str:
    names = [batch.describe_graph(graph) for graph in range(min(batch.num_graphs, 4))]
    return ", ".join(names) + (f" and {batch.num_graphs - 4} more" if batch.num_graphs > 4 else "")


def _why_no_stress(batch: Batch) -> str:
    """What to say where a model gives no stress because some graph has no volume."""
    if graph_periodicity(batch).all_full:
        return ""
    return (
        f". A model gives no stress for a batch in which a graph has no cell that is periodic in three directions, and "
        f"{first_without_volume(batch)} has none: leave such structures out, or put them into a cell larger than the "
        "cutoff with pbc in all directions, give them NaN as label of the stress and use ignore_nonfinite=True"
    )
