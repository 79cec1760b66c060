"""A tiny model for tests and documentation."""

from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig
from nvalchemi.models.derivatives import sum_per_graph
from nvalchemi.typing import Float, Int


class DemoModel(nn.Module):
    """Atomic energies from a small network of the element and the position of each atom.

    It is smooth, trainable and fast, and it is not physics: the energy depends on absolute positions, so it changes
    under translation and rotation.

    Parameters
    ----------
    num_atom_types : int, default 119
        Elements with a row in the embedding table (atomic numbers 0 to ``num_atom_types − 1``).
    hidden_dim : int, default 16
        Width of the embedding and of the hidden layer.
    """

    def __init__(self, num_atom_types: int = 119, hidden_dim: int = 16) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.embedding = nn.Embedding(num_atom_types, hidden_dim)
        self.position_layer = nn.Linear(3, hidden_dim)
        self.readout = nn.Sequential(nn.Linear(hidden_dim, hidden_dim), nn.SiLU(), nn.Linear(hidden_dim, 1))

    def features(
        self, atomic_numbers: Int[Tensor, " N"], positions: Float[Tensor, "N 3"]
    ) -> Float[Tensor, "N hidden"]:
        """Features of each atom before the readout."""
        return self.embedding(atomic_numbers) + self.position_layer(positions)

    def forward(
        self, atomic_numbers: Int[Tensor, " N"], positions: Float[Tensor, "N 3"]
    ) -> Float[Tensor, " N"]:
        """Energy of each atom, eV."""
        return self.readout(self.features(atomic_numbers, positions)).squeeze(-1)


class DemoModelWrapper(nn.Module, BaseModelMixin):
    """:class:`DemoModel` behind the model interface: what a wrapper looks like.

    Parameters
    ----------
    model : DemoModel, optional
        The network; a new one by default.

    Examples
    --------
    >>> from nvalchemi.data import AtomicData, Batch
    >>> batch = Batch.from_data_list([AtomicData(positions=[[0.0, 0.0, 0.0]], atomic_numbers=[18])])
    >>> outputs = DemoModelWrapper()(batch)
    >>> {name: list(tensor.shape) for name, tensor in outputs.items()}
    {'energy': [1, 1], 'forces': [1, 3]}
    """

    def __init__(self, model: DemoModel | None = None) -> None:
        super().__init__()
        self.model = DemoModel() if model is None else model
        self.model_config = ModelConfig(autograd_outputs=frozenset({"forces", "stress"}), supports_pbc=True)

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Energy, forces and stress of a batch."""
        return self.differentiate(self.energies, data)

    def energies(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Energy of each graph."""
        positions = inputs["positions"].to(self.model.position_layer.weight.dtype)
        per_atom = self.model(inputs["atomic_numbers"], positions)
        return {"energy": sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"])}

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the embeddings."""
        return {"node_embeddings": (self.model.hidden_dim,), "graph_embeddings": (self.model.hidden_dim,)}

    def compute_embeddings(self, data: Batch) -> dict[str, Tensor]:
        """Features of each atom and their sum over each graph."""
        weights = self.model.position_layer.weight
        with torch.set_grad_enabled(self.keeps_graph):
            nodes = self.model.features(data.atomic_numbers, data.positions.to(weights.dtype))
            graphs = nodes.new_zeros(data.num_graphs, nodes.shape[1]).index_add(0, data.batch_idx, nodes)
        return {"node_embeddings": nodes.to(data.dtype), "graph_embeddings": graphs.to(data.dtype)}
