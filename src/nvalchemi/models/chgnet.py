"""CHGNet, a charge-informed universal potential (B. Deng et al., Nat. Mach. Intell. 5, 1031 (2023))."""

import contextlib
import io
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi._optional import import_extra
from nvalchemi.data import Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig, NeighborConfig
from nvalchemi.models.derivatives import Edges, check_elements, edges_within_cutoff, sum_per_graph
from nvalchemi.typing import Bool, Int

PRETRAINED = ("0.3.0", "r2scan")
"""Weights inside the package chgnet. Its 0.2.0 is left out: a bias in its bond update gives a structure without angles
another energy when it shares a batch with one that has some."""

_NUM_ELEMENTS = 94  # H to Pu, rows of CHGNet's embedding table


class CHGNetWrapper(nn.Module, BaseModelMixin):
    """CHGNet on batches, from this package's neighbour list.

    Atom graph, undirected bonds and angles are built for the whole batch with tensor operations and one forward pass
    evaluates it; the published layers are used as they are. Energies are in eV (not eV/atom) and stress in eV/Å³ (not
    GPa).

    Parameters
    ----------
    model : str, path or chgnet.model.CHGNet, default "0.3.0"
        Pretrained weights inside the package chgnet (``"0.3.0"``, trained on MPtrj, or ``"r2scan"``), a checkpoint
        file, or a model.
    device : torch.device or str, optional
        Where the model is put; default: the CPU, or where a given model is.
    dtype : torch.dtype, default torch.float32
        Precision of the network. Edge vectors are formed and energies summed in the batch's dtype and in float64.

    Raises
    ------
    ImportError
        The extra ``nvalchemi[chgnet]`` is not installed.
    ValueError
        Unknown weights. On evaluation: an element beyond plutonium, or a neighbour list that lacks one of the two
        directions of a pair.

    Notes
    -----
    The wrapper starts in evaluation mode. Magnetic moments (µB, [N]) are the further output ``"magmoms"``:
    ``set_config("active_outputs", {"energy", "forces", "magmoms"})``. CHGNet was trained on bulk crystals; the package
    itself refuses structures with an atom that has no neighbour within 6 Å, here such an atom contributes the energy of
    a bare atom, which is finite and smooth and of no physical meaning.
    """

    known_elements: Tensor

    def __init__(
        self,
        model: "str | PathLike[str] | nn.Module" = "0.3.0",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        import_extra("chgnet", extra="chgnet", needed_by=type(self).__name__)
        self.model: Any = model if isinstance(model, nn.Module) else _load(model)
        self.bond_cutoff = float(self.model.graph_converter.bond_graph_cutoff)
        known = torch.zeros(_NUM_ELEMENTS + 1, dtype=torch.bool)
        known[1:] = True
        self.register_buffer("known_elements", known, persistent=False)
        self._check_supported()
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "magmoms"}),
            autograd_outputs=frozenset({"forces", "stress"}),
            supports_pbc=True,
            neighbor_config=NeighborConfig(cutoff=float(self.model.graph_converter.atom_graph_cutoff)),
        )
        self.to(device or next(self.model.parameters()).device, dtype).eval()

    def _check_supported(self) -> None:
        from chgnet.model.composition_model import AtomRef

        if not self.model.mlp_first:
            raise ValueError(
                "CHGNet models that pool features before the readout (mlp_first=False) are not supported"
            )
        composition = self.model.composition_model
        if composition is not None and not isinstance(composition, AtomRef):
            raise ValueError(
                f"CHGNet composition model {type(composition).__name__} is not supported, only AtomRef"
            )

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Energy, forces and stress of a batch, and magnetic moments when asked for."""
        check_elements(data, self.known_elements, "CHGNet")
        return self.differentiate(self.energies, data)

    def energies(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Energy of each graph and magnetic moment of each atom."""
        if inputs["positions"].shape[0] == 0:
            nothing = inputs["positions"].new_zeros(inputs["num_graphs"], 1)
            return {"energy": nothing, "magmoms": nothing.new_zeros(0)}
        prediction = self._predict(inputs)
        per_atom = torch.cat(prediction["site_energies"]).to(torch.float64)
        if self.model.composition_model is not None:
            reference = self.model.composition_model.fc.weight[0].to(torch.float64)
            per_atom = per_atom + reference[inputs["atomic_numbers"] - 1]
        energy = sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"])
        return {"energy": energy, "magmoms": torch.cat(prediction["m"])}

    def _predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
        edges = edges_within_cutoff(inputs, self.model.graph_converter.atom_graph_cutoff)
        graph = self._graph(inputs, edges)
        return self.model._compute(
            graph, compute_magmom=True, return_site_energies=True, return_atom_feas=True
        )

    def _graph(self, inputs: dict[str, Any], edges: Edges) -> Any:
        from chgnet.model.model import BatchedGraph

        vectors = edges.vectors.to(next(self.model.parameters()).dtype)
        lengths = vectors.norm(dim=1)
        directions = vectors / lengths.unsqueeze(1)
        num_atoms = inputs["positions"].shape[0]
        undirected, representative = pair_directed_edges(edges.pairs, edges.shifts, num_atoms)
        first, second = angle_pairs(edges.pairs[:, 0], lengths.detach() < self.bond_cutoff, num_atoms)
        bond_lengths, encoder = lengths[representative], self.model.bond_basis_expansion
        return BatchedGraph(
            atomic_numbers=inputs["atomic_numbers"],
            bond_bases_ag=encoder.rbf_expansion_ag(bond_lengths),
            bond_bases_bg=encoder.rbf_expansion_bg(bond_lengths),
            angle_bases=self.model.angle_basis_expansion(directions[first], directions[second]),
            batched_atom_graph=edges.pairs,
            batched_bond_graph=torch.stack((edges.pairs[first, 0], undirected[first], undirected[second]), 1),
            atom_owners=inputs["batch_idx"],
            directed2undirected=undirected,
            # Read only by CHGNet's own differentiation.
            atom_positions=[],
            strains=[],
            volumes=[],
        )

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Features of each atom before the last convolution and their sum over each graph."""
        width = self.model.atom_fea_dim
        return {"node_embeddings": (width,), "graph_embeddings": (width,)}

    def compute_embeddings(self, data: Batch) -> dict[str, Tensor]:
        """Features of each atom before the last convolution and their sum over each graph."""
        check_elements(data, self.known_elements, "CHGNet")
        with torch.set_grad_enabled(self.keeps_graph):
            nodes = torch.cat(self._predict(self.adapt_input(data))["atom_fea"]).to(data.dtype)
            graphs = nodes.new_zeros(data.num_graphs, nodes.shape[1]).index_add(0, data.batch_idx, nodes)
        return {"node_embeddings": nodes, "graph_embeddings": graphs}

    def export_model(self, path: str | PathLike[str]) -> None:
        """Write a CHGNet checkpoint, readable by ``CHGNet.from_file`` and by ``CHGNetWrapper(path)``."""
        torch.save({"model": self.model.as_dict()}, path)


def pair_directed_edges(
    pairs: Int[Tensor, "E 2"], shifts: Int[Tensor, "E 3"], num_atoms: int
) -> tuple[Int[Tensor, " E"], Int[Tensor, " U"]]:
    """Match the two directions (i, j, S) and (j, i, −S) of each bond.

    Parameters
    ----------
    pairs, shifts : Tensor, shape [E, 2] and [E, 3]
        A full neighbour list.
    num_atoms : int
        Number of atoms.

    Returns
    -------
    tuple of Tensor
        Bond of each edge [E], and one edge of each bond [E / 2].

    Raises
    ------
    ValueError
        An edge has no partner.
    """
    first, second = pairs.unbind(1)
    shift = shifts.to(torch.int64)
    span = 2 * int(shift.abs().max()) + 1 if shift.numel() else 1
    shift_code = (shift[:, 0] * span + shift[:, 1]) * span + shift[:, 2]
    # The code is odd in S, and each S has another one: its sign tells the two directions of an atom's own image apart.
    backward = (first > second) | ((first == second) & (shift_code < 0))
    shift_code = torch.where(backward, -shift_code, shift_code)
    pair_code = torch.minimum(first, second) * num_atoms + torch.maximum(first, second)
    by_shift = shift_code.argsort(stable=True)
    order = by_shift[pair_code[by_shift].argsort(stable=True)]
    pair_code, shift_code = pair_code[order], shift_code[order]
    even, odd = slice(0, None, 2), slice(1, None, 2)
    matched = order.shape[0] % 2 == 0 and bool(
        (
            (pair_code[even] == pair_code[odd])
            & (shift_code[even] == shift_code[odd])
            & (backward[order[even]] != backward[order[odd]])
        ).all()
    )
    if not matched:
        raise ValueError("CHGNet needs a full neighbour list: some pair (i, j, S) comes without (j, i, −S)")
    undirected = torch.empty_like(order)
    undirected[order] = torch.arange(order.shape[0], device=order.device) // 2
    return undirected, order[even]


def angle_pairs(
    center: Int[Tensor, " E"], short: Bool[Tensor, " E"], num_atoms: int
) -> tuple[Int[Tensor, " A"], Int[Tensor, " A"]]:
    """All ordered pairs of different short edges that start at the same atom.

    Parameters
    ----------
    center : Tensor, shape [E]
        First atom of each edge.
    short : Tensor of bool, shape [E]
        Edges that take part.
    num_atoms : int
        Number of atoms.

    Returns
    -------
    tuple of Tensor
        Indices of the first and of the second edge of each angle, [A] each.
    """
    edges = short.nonzero().squeeze(1)
    edges = edges[center[edges].argsort(stable=True)]
    counts = torch.bincount(center[edges], minlength=num_atoms)
    partners = counts[center[edges]]
    rows = torch.repeat_interleave(torch.arange(edges.shape[0], device=edges.device), partners)
    start_of_atom = counts.cumsum(0) - counts
    start_of_row = partners.cumsum(0) - partners
    columns = (
        torch.arange(rows.shape[0], device=edges.device)
        - start_of_row[rows]
        + start_of_atom[center[edges[rows]]]
    )
    different = rows != columns
    return edges[rows[different]], edges[columns[different]]


def _load(name: str | PathLike[str]) -> nn.Module:
    from chgnet.model.model import CHGNet

    # CHGNet announces itself on the standard output, which may be a pipe that a program reads.
    with contextlib.redirect_stdout(io.StringIO()):
        if str(name) in PRETRAINED:
            return CHGNet.load(model_name=str(name), use_device="cpu", verbose=False)
        try:
            return CHGNet.from_file(str(name))
        except FileNotFoundError as error:
            raise ValueError(
                f"{str(name)!r} is neither a file nor CHGNet weights; weights are {', '.join(PRETRAINED)}"
            ) from error
