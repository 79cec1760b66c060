"""MACE, higher-order equivariant message passing (I. Batatia et al., NeurIPS 35, 11423 (2022))."""

import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi._optional import import_extra
from nvalchemi.data import Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig, NeighborConfig
from nvalchemi.models.derivatives import check_elements, edges_within_cutoff, sum_per_graph


class MACEWrapper(nn.Module, BaseModelMixin):
    """MACE on batches, from this package's neighbour list.

    The published model gives atomic energies from edge vectors; forces and stress are derivatives of their sum by
    positions and strain. Vectors are formed in the batch's dtype before they are rounded to the model's.

    Parameters
    ----------
    model : path or mace.modules.MACE
        A model file as mace-torch writes it, or a model. A file is unpickled, which can run code: load only files you
        trust. Nothing is downloaded.
    head : str, optional
        Which head of a multi-head model predicts; default: the only one, or the one called ``default`` in any case.
    device : torch.device or str, optional
        Where the model is put; default: the CPU, or where a given model is.
    dtype : torch.dtype, optional
        Precision of the network, also under autocast, whose mixtures of dtypes its layers refuse; default: that of its
        weights.

    Raises
    ------
    ImportError
        The extra ``nvalchemi[mace]`` is not installed.
    ValueError
        No such file, a file that holds no MACE energy model, an unknown head. On evaluation: an element the model does
        not know.

    Notes
    -----
    The wrapper starts in evaluation mode. ``train()`` makes outputs differentiable by the parameters, forces and stress
    included. Models with inputs beyond the structure (charge or spin embeddings) are refused.
    """

    element_index: Tensor
    known_elements: Tensor

    def __init__(
        self,
        model: "str | PathLike[str] | nn.Module",
        *,
        head: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        modules = import_extra("mace.modules", extra="mace", needed_by=type(self).__name__)
        self.name = type(self).__name__ if isinstance(model, nn.Module) else Path(model).stem
        self.model: Any = _load(model)
        _check_is_energy_model(self.model, modules)
        self.head_index = _head_index(self.model, head)
        numbers: Tensor = self.model.atomic_numbers.cpu()
        index = torch.full((int(numbers.max()) + 1,), -1, dtype=torch.int64)
        index[numbers] = torch.arange(len(numbers))
        self.register_buffer("element_index", index, persistent=False)
        self.register_buffer("known_elements", index >= 0, persistent=False)
        self.num_elements = len(numbers)
        self.model_config = ModelConfig(
            autograd_outputs=frozenset({"forces", "stress"}),
            supports_pbc=True,
            neighbor_config=NeighborConfig(cutoff=float(self.model.r_max)),
        )
        weights = next(self.model.parameters())
        self.to(device or weights.device, dtype or weights.dtype).eval()

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Energy, forces and stress of a batch."""
        check_elements(data, self.known_elements, self.name)
        with torch.autocast(data.device.type, enabled=False):
            return self.differentiate(self.energies, data)

    def energies(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Energy of each graph."""
        per_atom = self._run(inputs)["node_energy"]
        return {"energy": sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"])}

    def _run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        edges = edges_within_cutoff(inputs, float(self.model.r_max))
        batch_idx: Tensor = inputs["batch_idx"]
        dtype = next(self.model.parameters()).dtype
        elements = self.element_index[inputs["atomic_numbers"]]
        graphs = inputs["num_graphs"]
        # The model forms x_j − x_i + shift: with all atoms at the origin the shift is the vector itself.
        origin = torch.zeros((batch_idx.shape[0], 3), dtype=dtype, device=batch_idx.device)
        return self.model(
            {
                "positions": origin,
                "node_attrs": nn.functional.one_hot(elements, self.num_elements).to(dtype),
                "edge_index": edges.pairs.t().contiguous(),
                "shifts": edges.vectors.to(dtype),
                "unit_shifts": edges.shifts.to(dtype),
                "cell": origin.new_zeros((3 * graphs, 3)),
                "batch": batch_idx,
                "ptr": torch.empty(graphs + 1, device=batch_idx.device),  # only its length is read
                "head": batch_idx.new_full((graphs,), self.head_index),
            },
            compute_force=False,
        )

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Features of each atom after every layer, side by side, and their sum over each graph."""
        width = sum(product.linear.irreps_out.dim for product in self.model.products)
        return {"node_embeddings": (width,), "graph_embeddings": (width,)}

    def compute_embeddings(self, data: Batch) -> dict[str, Tensor]:
        """Features of each atom after every layer, equivariant ones included, and their sum over each graph."""
        check_elements(data, self.known_elements, self.name)
        with torch.set_grad_enabled(self.keeps_graph), torch.autocast(data.device.type, enabled=False):
            nodes = self._run(self.adapt_input(data))["node_feats"].to(data.dtype)
            graphs = nodes.new_zeros(data.num_graphs, nodes.shape[1]).index_add(0, data.batch_idx, nodes)
        return {"node_embeddings": nodes, "graph_embeddings": graphs}

    def export_model(self, path: str | PathLike[str]) -> None:
        """Write a model file as mace-torch does, readable by its tools and by ``MACEWrapper(path)``."""
        torch.save(self.model, path)


def _load(model: "str | PathLike[str] | nn.Module") -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if not Path(model).is_file():
        raise ValueError(f"no MACE model file {str(model)!r}; nothing is downloaded, give the path of a file")
    with warnings.catch_warnings():
        # e3nn 0.4 keeps layers as TorchScript, which torch calls deprecated on loading.
        warnings.filterwarnings("ignore", message=".*torch.jit.*is deprecated", category=DeprecationWarning)
        return torch.load(model, map_location="cpu", weights_only=False)


def _check_is_energy_model(model: Any, modules: Any) -> None:
    # Subclasses add terms (dipoles, long range) that atomic energies do not hold.
    if type(model) not in (modules.MACE, modules.ScaleShiftMACE):
        raise ValueError(f"expected a MACE or ScaleShiftMACE energy model, got {type(model).__name__}")
    inputs: list[str] = sorted(getattr(model, "embedding_specs", None) or ())
    if inputs:
        raise ValueError(f"MACE models with embeddings of {', '.join(inputs)} are not supported")


def _head_index(model: Any, head: str | None) -> int:
    heads: list[str] = list(model.heads)
    if head is not None:
        if head not in heads:
            raise ValueError(f"unknown head {head!r}; this MACE model has {', '.join(heads)}")
        return heads.index(head)
    if len(heads) == 1:
        return 0
    for index, name in enumerate(heads):
        if name.lower() == "default":
            return index
    raise ValueError(f"this MACE model needs head=, one of {', '.join(heads)}")
