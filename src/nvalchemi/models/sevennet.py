"""SevenNet, an equivariant universal potential (Y. Park et al., J. Chem. Theory Comput. 20, 4857 (2024))."""

import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi._optional import import_extra
from nvalchemi.data import Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig, NeighborConfig
from nvalchemi.models.convolution import Graph, TensorProductConvolution, is_convolution
from nvalchemi.models.derivatives import check_elements, edges_within_cutoff, sum_per_graph


class SevenNetWrapper(nn.Module, BaseModelMixin):
    """SevenNet on batches, from this package's neighbour list.

    The layers of the published model up to the atomic energies are used; on the CPU, outside training, with compiled
    convolutions that are equal to its own (:mod:`nvalchemi.models.convolution`). Forces and stress are derivatives
    of the energy by positions and strain; SevenNet's own force output is left aside because it rounds edge vectors and
    sums in float32 and gives molecules a stress for a made-up volume of 0.001 Å³.

    Parameters
    ----------
    model : str, path or sevenn.nn.sequential.AtomGraphSequential, default "7net-0"
        Name of a pretrained model, a checkpoint file, or a model. The weights of ``7net-0`` (11 July 2024),
        ``7net-0_22may2024``, ``7net-l3i5`` and ``7net-mf-0`` come with the package sevenn; it downloads others.
    modal : str, optional
        Which of the data sets a multi-fidelity model was trained on to predict; names are those of the model.
    device : torch.device or str, optional
        Where the model is put; default: the CPU, or where a given model is.
    dtype : torch.dtype, default torch.float32
        Precision of the network, also under autocast, whose mixtures of dtypes its layers refuse. Edge vectors are
        formed and energies summed in the batch's dtype and in float64.

    Raises
    ------
    ImportError
        The extra ``nvalchemi[sevennet]`` is not installed.
    ValueError
        Unknown name or modal. On evaluation: an element the model does not know.

    Notes
    -----
    The wrapper starts in evaluation mode. ``train()`` makes outputs differentiable by the parameters, forces and stress
    included. Sign: SevenNet's ``inferred_stress`` is −σ in the order xx, yy, zz, xy, yz, zx; here σ is tensile
    positive.
    """

    element_index: Tensor
    known_elements: Tensor

    def __init__(
        self,
        model: "str | PathLike[str] | nn.Module" = "7net-0",
        *,
        modal: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        import_extra("sevenn", extra="sevennet", needed_by=type(self).__name__)
        self.name = model if isinstance(model, str) else type(self).__name__
        self._checkpoint_config: dict[str, Any] | None = None
        if not isinstance(model, nn.Module):
            model, self._checkpoint_config = _load_checkpoint(model)
        self.model: Any = model
        self.modal_index = _modal_index(self.model, modal)
        self.model.set_is_batch_data(True)
        index = torch.full((max(self.model.type_map) + 1,), -1, dtype=torch.int64)
        for number, position in self.model.type_map.items():
            index[number] = position
        self.register_buffer("element_index", index, persistent=False)
        self.register_buffer("known_elements", index >= 0, persistent=False)
        self.model_config = ModelConfig(
            autograd_outputs=frozenset({"forces", "stress"}),
            supports_pbc=True,
            neighbor_config=NeighborConfig(cutoff=float(self.model.cutoff)),
        )
        self._convolutions = _compiled_convolutions(self.model)
        self._onehot, self._left_out = _layer_roles(self.model)
        self.to(device or next(self.model.parameters()).device, dtype).eval()

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Energy, forces and stress of a batch."""
        check_elements(data, self.known_elements, self.name)
        with torch.autocast(data.device.type, enabled=False):
            return self.differentiate(self.energies, data)

    def energies(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Energy of each graph and of each atom."""
        per_atom = self._run(inputs)["atomic_energy"].squeeze(-1)
        return {"energy": sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"])}

    def _run(self, inputs: dict[str, Any], until: str | None = None) -> dict[str, Tensor]:
        """Pass the graph through the model's layers, up to but without the one named ``until``."""
        edges = edges_within_cutoff(inputs, self.model.cutoff)
        dtype = next(self.model.parameters()).dtype
        state: dict[str, Tensor] = {
            "x": self.element_index[inputs["atomic_numbers"]],
            "edge_vec": edges.vectors.to(dtype),
            # Indexing through a strided view costs a tenth of the evaluation.
            "edge_index": edges.pairs.t().contiguous(),
            "batch": inputs["batch_idx"],
        }
        if self.modal_index is not None:
            state["modal_type"] = inputs["batch_idx"].new_full((inputs["num_graphs"],), self.modal_index)
        graph = self._fused_over(state)
        for name, layer in self.model.named_children():
            if name == until:
                break
            if name in self._left_out:
                continue
            if graph is not None and name in self._convolutions:
                weights = layer.weight_nn(state[layer.key_weight_input])
                state[layer.key_x] = self._convolutions[name](
                    state[layer.key_x],
                    state[layer.key_filter],
                    weights,
                    graph,
                    1.0 / float(layer.denominator),
                )
                continue
            state = layer(state)
            for key in self._onehot.get(name, ()):
                state[key] = state[key].to(dtype)
        return state

    def _fused_over(self, state: dict[str, Tensor]) -> Graph | None:
        """Edges for the compiled convolutions; ``None`` where SevenNet's own have to be used."""
        vectors = state["edge_vec"]
        compiled = vectors.device.type == "cpu" and vectors.dtype in (torch.float32, torch.float64)
        if self.keeps_graph or not compiled or not self._convolutions:
            return None
        target, source = state["edge_index"]
        return Graph(source, target, num_atoms=state["x"].shape[0])

    @property
    def embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        """Invariant features of each atom before the readout and their sum over each graph."""
        from e3nn.o3 import Irreps

        width = Irreps(self.model.get_irreps_in("reduce_input_to_hidden")).dim
        return {"node_embeddings": (width,), "graph_embeddings": (width,)}

    def compute_embeddings(self, data: Batch) -> dict[str, Tensor]:
        """Features of each atom before the readout and their sum over each graph."""
        check_elements(data, self.known_elements, self.name)
        with torch.set_grad_enabled(self.keeps_graph), torch.autocast(data.device.type, enabled=False):
            nodes = self._run(self.adapt_input(data), until="reduce_input_to_hidden")["x"].to(data.dtype)
            graphs = nodes.new_zeros(data.num_graphs, nodes.shape[1]).index_add(0, data.batch_idx, nodes)
        return {"node_embeddings": nodes, "graph_embeddings": graphs}

    def export_model(self, path: str | PathLike[str]) -> None:
        """Write a SevenNet checkpoint, readable by sevenn's own tools and by ``SevenNetWrapper(path)``."""
        if self._checkpoint_config is None:
            raise ValueError(
                "a SevenNetWrapper made from a model object has no configuration to write a checkpoint with"
            )
        import sevenn

        # The state is that of the installed version: under the version it was trained with it would be converted again.
        config = {**self._checkpoint_config, "version": sevenn.__version__}
        # A copy of the model, as that with averaged weights, has constants of the compiled code as buffers besides.
        state = {k: v for k, v in self.model.state_dict().items() if "._tensor_constant" not in k}
        torch.save({"config": config, "model_state_dict": state}, path)


def _load_checkpoint(name: str | PathLike[str]) -> tuple[nn.Module, dict[str, Any]]:
    # e3nn and sevenn build their layers with torch.jit.script, which warns that it is deprecated.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*is deprecated", category=DeprecationWarning)
        from sevenn.util import get_available_pretrained_models, load_checkpoint

        if not Path(name).is_file():
            known = get_available_pretrained_models()
            if not str(name).lower().startswith(("7net", "sevennet")):
                raise ValueError(
                    f"{str(name)!r} is neither a file nor a SevenNet model; models are {', '.join(known)}"
                )
        checkpoint = load_checkpoint(str(name))
        return checkpoint.build_model(), checkpoint.config


def _modal_index(model: Any, modal: str | None) -> int | None:
    known: dict[str, int] = model.modal_map or {}
    if modal is None and known:
        raise ValueError(f"this SevenNet model needs modal=, one of {', '.join(known)}")
    if modal is None:
        return None
    for name, index in known.items():
        if name.lower() == modal.lower():
            return index
    raise ValueError(f"unknown modal {modal!r}; this SevenNet model has {', '.join(known) or 'none'}")


def _compiled_convolutions(model: nn.Module) -> dict[str, TensorProductConvolution]:
    """The layers for which there is a compiled form, by name."""
    from sevenn.nn.convolution import IrrepsConvolution

    return {
        name: TensorProductConvolution(layer.convolution)
        for name, layer in model.named_children()
        if type(layer) is IrrepsConvolution and is_convolution(layer.convolution)
    }


def _layer_roles(model: nn.Module) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """What the one-hot layers write (always float32, to be cast), and the layers that are not needed."""
    from sevenn.nn import force_output
    from sevenn.nn.edge_embedding import EdgePreprocess
    from sevenn.nn.linear import AtomReduce
    from sevenn.nn.node_embedding import OnehotEmbedding

    replaced = (
        EdgePreprocess,
        AtomReduce,
        force_output.ForceOutput,
        force_output.ForceStressOutput,
        force_output.ForceStressOutputFromEdge,
    )
    onehot: dict[str, tuple[str, ...]] = {}
    left_out: set[str] = set()
    for name, layer in model.named_children():
        if isinstance(layer, OnehotEmbedding):
            written: tuple[Any, Any] = (layer.key_output, layer.key_additional_output)
            onehot[name] = tuple(key for key in written if key is not None)
        elif isinstance(layer, replaced):
            left_out.add(name)
    return onehot, frozenset(left_out)
