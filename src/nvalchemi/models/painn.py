"""PaiNN, a small equivariant potential (K. T. Schütt, O. T. Unke, M. Gastegger, ICML 2021, arXiv:2102.03150)."""

import json
import math
from collections.abc import Iterable
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn

from nvalchemi._optional import import_extra
from nvalchemi.data import AtomicData, Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig, NeighborConfig
from nvalchemi.models.derivatives import check_elements, edges_within_cutoff, sum_per_graph
from nvalchemi.models.reference_energies import fit_reference_energies
from nvalchemi.typing import Float, Int

__all__ = ["PaiNN"]

NUM_ELEMENTS = 119
"""Rows of the element tables: atomic numbers 0 (a dummy atom) to 118."""
NORM_EPSILON = 1e-8
"""Added under the square root of vector norms, which has no derivative at the zero vectors of an isolated atom."""


class PaiNN(nn.Module, BaseModelMixin):
    """Energy of a structure from scalar and vector features of its atoms; forces and stress by autograd.

    Each atom i carries F scalars ``s_i`` and F vectors ``v_i``. A layer first adds messages from the neighbours, then
    mixes the features of each atom:

    ========= ===================================================================== ===========
    step      features                                                              in the paper
    ========= ===================================================================== ===========
    message   ``Δs_i = Σ_j φ_s(s_j) W_s(r_ij)``                                     Eq. 7
    message   ``Δv_i = Σ_j v_j φ_vv(s_j) W_vv(r_ij) + φ_vs(s_j) W_vs(r_ij) r̂_ij``   Eq. 8
    update    ``Δs_i = a_ss + a_sv ⟨U v_i, V v_i⟩``, ``a = a(s_i, |V v_i|)``        Eq. 9
    update    ``Δv_i = a_vv U v_i``                                                 Eq. 10
    ========= ===================================================================== ===========

    The filters W are linear in a Bessel basis. Instead of the paper's cosine cutoff they carry a polynomial envelope
    with two vanishing derivatives at the cutoff (J. Gasteiger, J. Groß, S. Günnemann, ICLR 2020, Eq. 8), so that forces
    are differentiable and Hessians continuous. The energy is ``Σ_i scale · readout(s_i) + E_ref(Z_i)``.

    Parameters
    ----------
    hidden_dim : int, default 64
        Number of scalar and of vector features, F. The paper has 128; 64 is more than twice as fast on a CPU.
    num_layers : int, default 3
        Rounds of message and update, as in the paper.
    num_radial : int, default 20
        Functions of the radial basis, as in the paper.
    cutoff : float, default 5.0
        Distance up to which atoms are neighbours, Å, as in the paper.

    Raises
    ------
    ValueError
        A size that is not positive.

    Notes
    -----
    Call :meth:`fit_reference_energies` with the training data before training: the network then has to learn what is
    left of the energies, a number of order one. The weights are of torch's default dtype; ``model.double()`` makes
    them float64.

    Examples
    --------
    >>> from nvalchemi.neighbors import compute_neighbors
    >>> model = PaiNN(hidden_dim=8)
    >>> dimer = AtomicData(positions=[[0.0, 0.0, 0.0], [0.0, 0.0, 0.74]], atomic_numbers=[1, 1])
    >>> batch = Batch.from_data_list([dimer])
    >>> compute_neighbors(batch, config=model.model_config.neighbor_config)
    >>> {name: list(value.shape) for name, value in model(batch).items()}
    {'energy': [1, 1], 'forces': [2, 3]}
    """

    reference_energies: Tensor
    scale: Tensor
    known_elements: Tensor

    def __init__(
        self, hidden_dim: int = 64, num_layers: int = 3, num_radial: int = 20, cutoff: float = 5.0
    ) -> None:
        super().__init__()
        sizes = {
            "hidden_dim": hidden_dim,
            "num_layers": num_layers,
            "num_radial": num_radial,
            "cutoff": cutoff,
        }
        for name, size in sizes.items():
            if not 0 < size < math.inf:
                raise ValueError(f"{name} must be positive, got {size}")
        self.architecture: dict[str, Any] = sizes
        self.model_config = ModelConfig(
            autograd_outputs=frozenset({"forces", "stress"}),
            supports_pbc=True,
            neighbor_config=NeighborConfig(cutoff=cutoff),
        )
        self.embedding = nn.Embedding(NUM_ELEMENTS, hidden_dim)
        self.messages = nn.ModuleList(_Message(hidden_dim, num_radial) for _ in range(num_layers))
        self.updates = nn.ModuleList(_Update(hidden_dim) for _ in range(num_layers))
        self.readout = _mlp(hidden_dim, max(hidden_dim // 2, 1), 1)
        self.register_buffer("reference_energies", torch.zeros(NUM_ELEMENTS, dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("known_elements", torch.ones(NUM_ELEMENTS, dtype=torch.bool))

    # ------------------------------------------------------------------ evaluation
    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Energy [B, 1], forces [N, 3] and stress [B, 3, 3] of a batch with a neighbour list.

        Raises
        ------
        ValueError
            No neighbour list, or an element that was not in the data of :meth:`fit_reference_energies`.
        """
        check_elements(data, self.known_elements, "PaiNN")
        return self.differentiate(self.energies, data)

    def energies(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Energy of each graph, eV, float64."""
        network = self.readout(self.features(inputs)).squeeze(-1).to(torch.float64)
        per_atom = network * self.scale + self.reference_energies[inputs["atomic_numbers"]].to(torch.float64)
        return {"energy": sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"])}

    def features(self, inputs: dict[str, Any]) -> Float[Tensor, "N hidden"]:
        """Scalar features of each atom after the last layer."""
        cutoff: float = self.architecture["cutoff"]
        edges = edges_within_cutoff(inputs, cutoff)
        i, j = edges.pairs.unbind(1)
        vectors = edges.vectors.to(self.embedding.weight.dtype)
        distances = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        directions = (vectors / distances).unsqueeze(-1)
        basis = bessel_basis(distances, cutoff, self.architecture["num_radial"])
        basis = basis * polynomial_envelope(distances / cutoff)

        scalars = self.embedding(inputs["atomic_numbers"])
        vector_features: Tensor | None = None
        for message, update in zip(self.messages, self.updates, strict=True):
            scalars, vector_features = message(scalars, vector_features, basis, directions, i, j)
            scalars, vector_features = update(scalars, vector_features)
        return scalars

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the embeddings."""
        hidden_dim: int = self.architecture["hidden_dim"]
        return {"node_embeddings": (hidden_dim,), "graph_embeddings": (hidden_dim,)}

    def compute_embeddings(self, data: Batch) -> dict[str, Tensor]:
        """Scalar features of each atom after the last layer, and their sum over each graph."""
        check_elements(data, self.known_elements, "PaiNN")
        with torch.set_grad_enabled(self.keeps_graph):
            nodes = self.features(self.adapt_input(data)).to(data.dtype)
            graphs = nodes.new_zeros(data.num_graphs, nodes.shape[1]).index_add(0, data.batch_idx, nodes)
        return {"node_embeddings": nodes, "graph_embeddings": graphs}

    def fit_reference_energies(self, dataset: Iterable[AtomicData | Batch]) -> dict[int, float]:
        """Take the energies of the elements, and the scale of the network's output, from labelled structures.

        See :func:`~nvalchemi.models.reference_energies.fit_reference_energies`. Elements that do not occur are refused
        from then on.

        Returns
        -------
        dict
            Energy by atomic number, eV.
        """
        energies, scale = fit_reference_energies(dataset)
        table, known = torch.zeros_like(self.reference_energies), torch.zeros_like(self.known_elements)
        for number, energy in energies.items():
            table[number], known[number] = energy, True
        # New tensors and not written in place: check_elements remembers its answer for the tensor it was given.
        self.reference_energies, self.known_elements = table, known
        self.scale = torch.full_like(self.scale, scale)
        return energies

    # ------------------------------------------------------------------ files
    def export_model(self, path: str | PathLike[str]) -> None:
        """Write weights and sizes to one safetensors file, which :meth:`from_checkpoint` reads; no code is pickled."""
        save_file = import_extra(
            "safetensors.torch", extra="checkpoint", needed_by="PaiNN.export_model"
        ).save_file
        metadata = {"format": "nvalchemi.PaiNN", "architecture": json.dumps(self.architecture)}
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, path, metadata)

    @classmethod
    def from_checkpoint(cls, path: str | PathLike[str], *, device: torch.device | str = "cpu") -> Self:
        """Read a model that :meth:`export_model` wrote; it is in evaluation mode.

        Raises
        ------
        ValueError
            A safetensors file of something else, or a damaged one.
        """
        safetensors = import_extra("safetensors", extra="checkpoint", needed_by="PaiNN.from_checkpoint")
        try:
            with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != "nvalchemi.PaiNN":
                    raise ValueError(
                        f"{path} holds no PaiNN model: its header has {metadata or 'no metadata'}"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
        model = cls(**json.loads(metadata["architecture"]))
        model.load_state_dict(tensors, assign=True)
        return model.eval()


def bessel_basis(r: Float[Tensor, "E 1"], cutoff: float, number: int) -> Float[Tensor, "E {number}"]:
    """Radial basis ``√(2/r_c) sin(nπ r/r_c) / r``, n = 1 … number (Gasteiger et al., ICLR 2020, Eq. 7)."""
    n = torch.arange(1, number + 1, dtype=r.dtype, device=r.device)
    return torch.sin(r * (n * (math.pi / cutoff))) * (math.sqrt(2 / cutoff) / r)


def polynomial_envelope(x: Float[Tensor, "E 1"]) -> Float[Tensor, "E 1"]:
    """``1 − 28x⁶ + 48x⁷ − 21x⁸``: from 1 at x = 0 to 0 at x = 1 with two vanishing derivatives (Eq. 8 there, p = 6)."""
    return 1 - x**6 * (28 - 48 * x + 21 * x * x)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


class _Message(nn.Module):
    """Sum of what the neighbours send, Eqs. 7 and 8."""

    def __init__(self, hidden_dim: int, num_radial: int) -> None:
        super().__init__()
        self.network = _mlp(hidden_dim, hidden_dim, 3 * hidden_dim)
        # No bias: the filters must vanish at the cutoff, as the basis does.
        self.filters = nn.Linear(num_radial, 3 * hidden_dim, bias=False)

    def forward(
        self,
        scalars: Float[Tensor, "N F"],
        vectors: Float[Tensor, "N 3 F"] | None,
        basis: Float[Tensor, "E num_radial"],
        directions: Float[Tensor, "E 3 1"],
        i: Int[Tensor, " E"],
        j: Int[Tensor, " E"],
    ) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N 3 F"]]:
        # index_select and not indexing: its derivative is an index_add, that of indexing a slower index_put.
        sent = self.network(scalars).index_select(0, j) * self.filters(basis)
        to_scalars, along, from_vectors = sent.unsqueeze(1).chunk(3, dim=-1)
        to_vectors = along * directions
        if vectors is None:  # all zero before the first layer
            vectors = scalars.new_zeros(scalars.shape[0], 3, scalars.shape[1])
        else:
            to_vectors = to_vectors + from_vectors * vectors.index_select(0, j)
        both = torch.cat((to_scalars, to_vectors), dim=1).to(scalars.dtype)
        # One sum for scalars and vectors together.
        total = torch.cat((scalars.unsqueeze(1), vectors), dim=1).index_add(0, i, both)
        return total[:, 0], total[:, 1:]


class _Update(nn.Module):
    """Mixing of the features of each atom, Eqs. 9 and 10."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.mixing = nn.Linear(hidden_dim, 2 * hidden_dim, bias=False)
        self.network = _mlp(2 * hidden_dim, hidden_dim, 3 * hidden_dim)

    def forward(
        self, scalars: Float[Tensor, "N F"], vectors: Float[Tensor, "N 3 F"]
    ) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N 3 F"]]:
        u, v = self.mixing(vectors).chunk(2, dim=-1)
        # Under autocast v may be float16, in which the epsilon is 0 and the derivative of the root infinite.
        norm = (v.to(vectors.dtype).square().sum(1) + NORM_EPSILON).sqrt()
        a_ss, a_sv, a_vv = self.network(torch.cat((scalars, norm.to(scalars.dtype)), dim=-1)).chunk(3, dim=-1)
        return scalars + a_ss + a_sv * (u * v).sum(1), vectors + a_vv.unsqueeze(1) * u
