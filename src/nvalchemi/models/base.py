"""What a model promises: :class:`ModelConfig` says what it needs and gives, :class:`BaseModelMixin` how it is used."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.models.derivatives import derivatives_of_energy, first_without_volume, graph_periodicity
from nvalchemi.neighbors.config import NeighborConfig, NeighborListFormat

if TYPE_CHECKING:
    from nvalchemi.hooks import NeighborListHook
    from nvalchemi.models.sum import SumModel

__all__ = ["BaseModelMixin", "ModelConfig", "NeighborConfig", "NeighborListFormat", "evaluation_mode"]

_NEIGHBOR_FIELDS = {
    NeighborListFormat.COO: ("neighbor_list", "neighbor_list_shifts"),
    NeighborListFormat.MATRIX: ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts"),
}


class ModelConfig(BaseModel):
    """What a model takes and gives. Validated when made and when a field is assigned.

    Parameters
    ----------
    outputs : set of str, default {"energy"}
        Quantities the forward pass gives directly.
    autograd_outputs : set of str, default empty
        Quantities obtained by differentiating the energy (``"forces"``, ``"stress"``).
    autograd_inputs : set of str, default {"positions"}
        Inputs the energy is differentiated by; a stress also differentiates by a strain of positions and cell.
    required_inputs : set of str, default empty
        Fields a batch must have besides positions and atomic numbers, for example ``"charge"``.
    optional_inputs : set of str, default empty
        Fields the model uses when they are there.
    supports_pbc : bool, default False
        Whether periodic structures can be evaluated.
    needs_pbc : bool, default False
        Whether only structures periodic in three directions can be evaluated.
    neighbor_config : NeighborConfig, optional
        The neighbour list the model reads; ``None``: it needs none.
    active_outputs : set of str, optional
        What to compute. ``None``: energy, forces, and stress when every graph of the batch has a cell that is periodic
        in three directions; as far as the model gives them.
    gradient_keys : set of str, default empty
        Fields of the batch through which the caller differentiates the outputs (for example ``{"positions"}`` for
        second derivatives). When not empty, outputs keep their autograd graph in evaluation mode too.

    Raises
    ------
    pydantic.ValidationError
        An active output that the model cannot give, an input both required and optional, contradicting flags.

    Examples
    --------
    >>> config = ModelConfig(autograd_outputs={"forces"}, neighbor_config=NeighborConfig(cutoff=5.0))
    >>> config.needs_neighborlist, sorted(config.available_outputs)
    (True, ['energy', 'forces'])
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    outputs: frozenset[str] = frozenset({"energy"})
    autograd_outputs: frozenset[str] = frozenset()
    autograd_inputs: frozenset[str] = frozenset({"positions"})
    required_inputs: frozenset[str] = frozenset()
    optional_inputs: frozenset[str] = frozenset()
    supports_pbc: bool = False
    needs_pbc: bool = False
    neighbor_config: NeighborConfig | None = None
    active_outputs: frozenset[str] | None = None
    gradient_keys: frozenset[str] = frozenset()

    @property
    def needs_neighborlist(self) -> bool:
        """Whether a batch must carry a neighbour list."""
        return self.neighbor_config is not None

    @property
    def available_outputs(self) -> frozenset[str]:
        """Everything the model can give."""
        return self.outputs | self.autograd_outputs

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        # Runs before the fields are stored, so that a refused assignment leaves the configuration as it was.
        if not isinstance(values, Mapping):
            return values
        given: dict[str, Any] = {name: field.default for name, field in cls.model_fields.items()} | dict(
            values
        )
        available = frozenset(given["outputs"]) | frozenset(given["autograd_outputs"])
        unknown = frozenset(given["active_outputs"] or ()) - available
        if unknown:
            raise ValueError(
                f"active_outputs {sorted(unknown)} are not among the outputs of the model: {sorted(available)}"
            )
        both = frozenset(given["required_inputs"]) & frozenset(given["optional_inputs"])
        if both:
            raise ValueError(f"inputs {sorted(both)} cannot be both required and optional")
        if given["autograd_outputs"] and not given["autograd_inputs"]:
            raise ValueError(f"autograd_outputs {sorted(given['autograd_outputs'])} need autograd_inputs")
        if given["needs_pbc"] and not given["supports_pbc"]:
            raise ValueError("needs_pbc=True contradicts supports_pbc=False")
        return values


class BaseModelMixin:
    """Make an ``nn.Module`` a model: ``class MyModel(nn.Module, BaseModelMixin)``.

    A subclass sets ``self.model_config`` and defines ``forward(data)``, which takes a
    :class:`~nvalchemi.data.Batch` and returns a mapping with ``energy [B, 1]`` and, when active, ``forces [N, 3]`` and
    ``stress [B, 3, 3]``. A model never writes into the batch. Where forces and stress come from autograd, ``forward``
    is one line: ``return self.differentiate(self.energies, data)``.

    Outputs have the batch's floating-point type. In training mode (``model.train()``) with gradients enabled they keep
    the autograd graph that a loss needs; otherwise they carry none.

    A neighbour list may hold pairs beyond the cutoff (because of a skin, or in a sum of models): a model ignores them.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from nvalchemi.data import AtomicData, Batch
    >>> class Harmonic(nn.Module, BaseModelMixin):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.model_config = ModelConfig(autograd_outputs={"forces"})
    ...
    ...     def forward(self, data):
    ...         return self.differentiate(self.energies, data)
    ...
    ...     def energies(self, inputs):
    ...         per_atom = 0.5 * inputs["positions"].square().sum(-1)
    ...         return {"energy": sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"])}
    >>> from nvalchemi.models.derivatives import sum_per_graph
    >>> atom = AtomicData(positions=[[1.0, 0.0, 0.0]], atomic_numbers=[1])
    >>> Harmonic()(Batch.from_data_list([atom, atom]))["forces"].tolist()
    [[-1.0, -0.0, -0.0], [-1.0, -0.0, -0.0]]
    """

    model_config: ModelConfig
    training: bool

    # ------------------------------------------------------------------ evaluation
    def requested_outputs(self, data: Batch) -> frozenset[str]:
        """Outputs to compute for this batch (see ``active_outputs`` of :class:`ModelConfig`).

        Raises
        ------
        ValueError
            A stress is asked for by name and a graph has no cell periodic in three directions; the message names it.
        """
        config = self.model_config
        if config.active_outputs is not None:
            if "stress" in config.active_outputs and not graph_periodicity(data).all_full:
                raise ValueError(
                    f"the stress of {first_without_volume(data)} is undefined: it has no cell that is periodic in "
                    "three directions; take 'stress' out of active_outputs or give the structure a cell"
                )
            return config.active_outputs
        available = config.available_outputs
        requested = available & {"energy", "forces"}
        if "stress" in available and graph_periodicity(data).all_full:
            requested |= {"stress"}
        return requested

    def adapt_input(self, data: Batch) -> dict[str, Any]:
        """Collect from a batch what the model reads.

        Returns
        -------
        dict
            ``positions``, ``atomic_numbers``, ``batch_idx [N]``, ``num_graphs`` (an int), ``cell`` and ``pbc`` where
            present, the neighbour list in the configured format, the required fields and those optional ones that
            exist.

        Raises
        ------
        ValueError
            A required field or the neighbour list is missing; periodicity the model cannot treat.
        """
        config = self.model_config
        inputs: dict[str, Any] = {
            "positions": data.positions,
            "atomic_numbers": data.atomic_numbers,
            "batch_idx": data.batch_idx,
            "num_graphs": data.num_graphs,
        }
        missing = sorted(name for name in config.required_inputs if name not in data)
        if missing:
            raise ValueError(
                f"{type(self).__name__} needs the field {', '.join(map(repr, missing))}, which the batch does not "
                f"have; it has {', '.join(data.keys())}"
            )
        for name in ("cell", "pbc", *config.required_inputs, *config.optional_inputs):
            if name in data:
                inputs[name] = data[name]
        if config.neighbor_config is not None:
            for name in _NEIGHBOR_FIELDS[config.neighbor_config.format]:
                if name not in data:
                    raise ValueError(
                        f"{type(self).__name__} needs a neighbour list and the batch has no {name!r}: call "
                        "compute_neighbors(batch, config=model.model_config.neighbor_config) first"
                    )
                inputs[name] = data[name]
        if not config.supports_pbc or config.needs_pbc:
            self._check_periodicity(data)
        return inputs

    def adapt_output(self, raw: Mapping[str, Tensor], data: Batch) -> dict[str, Tensor]:
        """Pick the outputs asked for and give them the batch's dtype and a system output its shape [B, …].

        Raises
        ------
        ValueError
            ``raw`` lacks an output that was asked for.
        """
        return self._finish(raw, data, self.requested_outputs(data))

    def differentiate(
        self, energies: Callable[[dict[str, Any]], Mapping[str, Tensor]], data: Batch
    ) -> dict[str, Tensor]:
        """Evaluate an energy function and get forces and stress from it by autograd.

        Parameters
        ----------
        energies : callable
            Takes the dictionary of :meth:`adapt_input` and returns a mapping with ``"energy"`` [B, 1] (use
            :func:`~nvalchemi.models.derivatives.sum_per_graph`) and any other outputs. Positions and cell in that
            dictionary may be strained and track gradients.
        data : Batch
            The structures.

        Returns
        -------
        dict of Tensor
            The outputs asked for, finished by :meth:`adapt_output`'s rules.
        """
        requested = self.requested_outputs(data)
        raw = derivatives_of_energy(
            energies,
            self.adapt_input(data),
            forces="forces" in requested,
            stress="stress" in requested,
            create_graph=self.keeps_graph,
            attached=self.model_config.gradient_keys,
        )
        return self._finish(raw, data, requested)

    @property
    def keeps_graph(self) -> bool:
        """Whether outputs keep their autograd graph: training with gradients enabled, or ``gradient_keys`` is set."""
        return bool(self.model_config.gradient_keys) or (self.training and torch.is_grad_enabled())

    def _finish(self, raw: Mapping[str, Tensor], data: Batch, requested: frozenset[str]) -> dict[str, Tensor]:
        keep, dtype = self.keeps_graph, data.dtype
        outputs: dict[str, Tensor] = {}
        for name in sorted(requested):
            if name not in raw:
                raise ValueError(
                    f"{type(self).__name__} was asked for {name!r} and gave {', '.join(raw) or 'nothing'}"
                )
            value = raw[name] if keep else raw[name].detach()
            if value.is_floating_point():
                value = value.to(dtype)
            outputs[name] = value.reshape(-1, 1) if name == "energy" else value
        return outputs

    def _check_periodicity(self, data: Batch) -> None:
        periodicity = graph_periodicity(data)
        if self.model_config.needs_pbc and not periodicity.all_full:
            raise ValueError(
                f"{type(self).__name__} needs cells that are periodic in three directions; "
                f"{first_without_volume(data)} has none"
            )
        if not self.model_config.supports_pbc and periodicity.any_periodic:
            graph = int(data.pbc.any(1).nonzero()[0])
            raise ValueError(
                f"{type(self).__name__} cannot treat periodic structures; {data.describe_graph(graph)} is one"
            )

    # ------------------------------------------------------------------ configuration and companions
    def set_config(self, key: str, value: Any) -> None:
        """Change one field of ``model_config``; refused (and left as it was) when it contradicts the others.

        >>> from nvalchemi.models.demo import DemoModel, DemoModelWrapper
        >>> model = DemoModelWrapper(DemoModel())
        >>> model.set_config("active_outputs", {"energy"})
        >>> sorted(model.model_config.active_outputs)
        ['energy']
        """
        if key not in ModelConfig.model_fields:
            raise ValueError(
                f"{key!r} is not a field of ModelConfig; fields are {', '.join(ModelConfig.model_fields)}"
            )
        self.model_config = ModelConfig(**{**dict(self.model_config), key: value})

    def make_neighbor_hooks(self) -> "list[NeighborListHook]":
        """Hooks that keep the neighbour list this model needs up to date; empty when it needs none."""
        config = self.model_config.neighbor_config
        if config is None:
            return []
        from nvalchemi.hooks import NeighborListHook

        return [NeighborListHook(config)]

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape per atom or graph of each embedding :meth:`compute_embeddings` gives; empty when it gives none."""
        return {}

    def compute_embeddings(self, data: Batch) -> dict[str, Tensor]:
        """Learned features: ``node_embeddings [N, …]``, ``graph_embeddings [B, …]``; not written into the batch."""
        raise NotImplementedError(f"{type(self).__name__} gives no embeddings")

    def export_model(self, path: str | PathLike[str]) -> None:
        """Write the model to a file that :func:`nvalchemi.models.load_model` reads.

        By default the whole module is pickled, which needs the same code to read it. Wrappers of published models write
        their package's own checkpoint format instead.
        """
        torch.save(self, path)

    def __add__(self, other: "BaseModelMixin") -> "SumModel":
        """Model whose energy, forces and stress are the sums of those of both."""
        if not isinstance(other, BaseModelMixin):
            return NotImplemented
        from nvalchemi.models.sum import SumModel

        return SumModel(self, other)

    if TYPE_CHECKING:
        # Given by nn.Module, which comes first among the bases of a model.
        def __call__(self, data: Batch) -> dict[str, Tensor]: ...  # noqa: D102
        def eval(self) -> Self: ...  # noqa: D102
        def train(self, mode: bool = True) -> Self: ...  # noqa: D102


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every submodule gets back the mode it had, also after an error.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
    >>> with evaluation_mode(model):
    ...     model[0].training
    False
    >>> model.training, model[1].training
    (True, False)
    """
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
