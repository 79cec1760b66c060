"""Sums of models: ``model_a + model_b``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.models.base import BaseModelMixin, ModelConfig, NeighborConfig, NeighborListFormat
from nvalchemi.neighbors import compute_neighbors

ADDITIVE = frozenset({"energy", "forces", "stress"})
"""Outputs that add up. Others (magnetic moments, embeddings) belong to one model and are left out of a sum."""


class SumModel(nn.Module, BaseModelMixin):
    """Model whose energy, forces and stress are the sums of those of its members; written ``model_a + model_b``.

    Every member sees the neighbour list it asked for. Members that agree on format and half or full lists share one,
    made with the largest cutoff and skin among them: a model ignores the pairs beyond its own cutoff. That list is the
    one in ``model_config.neighbor_config``, to be kept up to date from outside. For a member that wants another format
    the list is searched within each evaluation.

    Parameters
    ----------
    *models : model
        Two or more models; a sum may itself be a member.

    Notes
    -----
    Members compute what their own ``active_outputs`` say; that of the sum only picks from it. ``gradient_keys`` of the
    sum hold for its members too, while it is evaluated.

    Examples
    --------
    >>> from nvalchemi.models.demo import DemoModelWrapper
    >>> model = DemoModelWrapper() + DemoModelWrapper()
    >>> len(model.members), sorted(model.model_config.available_outputs)
    (2, ['energy', 'forces', 'stress'])
    """

    def __init__(self, *models: BaseModelMixin) -> None:
        super().__init__()
        if len(models) < 2:
            raise ValueError(f"a sum needs at least two models, got {len(models)}")
        self.members = nn.ModuleList(cast("list[nn.Module]", models))
        configs = [model.model_config for model in models]
        outputs = ADDITIVE.intersection(*(config.available_outputs for config in configs))
        required = frozenset[str]().union(*(config.required_inputs for config in configs))
        optional = frozenset[str]().union(*(config.optional_inputs for config in configs))
        self.model_config = ModelConfig(
            outputs=outputs,
            required_inputs=required,
            optional_inputs=optional - required,
            supports_pbc=all(config.supports_pbc for config in configs),
            needs_pbc=any(config.needs_pbc for config in configs),
            neighbor_config=_shared_list(
                [c.neighbor_config for c in configs if c.neighbor_config is not None]
            ),
            gradient_keys=frozenset[str]().union(*(config.gradient_keys for config in configs)),
        )

    def forward(self, data: Batch) -> dict[str, Tensor]:
        """Sum of the members' outputs."""
        requested = self.requested_outputs(data)
        total: dict[str, Tensor] = {}
        for module in self.members:
            member = cast(BaseModelMixin, module)
            with _attached(member, self.model_config.gradient_keys):
                outputs = member(self._with_own_list(member, data))
            for name in requested:
                if name not in outputs:
                    raise ValueError(
                        f"{type(member).__name__}, a member of a sum, gave no {name!r}: its active_outputs are "
                        f"{sorted(member.model_config.active_outputs or ())}"
                    )
                total[name] = total[name] + outputs[name] if name in total else outputs[name]
        return self.adapt_output(total, data)

    def _with_own_list(self, member: BaseModelMixin, data: Batch) -> Batch:
        """The batch itself, or a shallow copy with another neighbour list; the batch is not written to."""
        own, shared = member.model_config.neighbor_config, self.model_config.neighbor_config
        if own is None or shared is None or _kind(own) == _kind(shared):
            return data
        copy = data.to()
        with torch.no_grad():
            compute_neighbors(copy, config=own)
        return copy


@contextmanager
def _attached(member: BaseModelMixin, keys: frozenset[str]) -> Iterator[None]:
    """Inside the block a model also keeps the graph through these fields."""
    own = member.model_config
    if not keys <= own.gradient_keys:
        member.model_config = own.model_copy(update={"gradient_keys": own.gradient_keys | keys})
    try:
        yield
    finally:
        member.model_config = own


def _kind(config: NeighborConfig) -> tuple[NeighborListFormat, bool]:
    return config.format, config.half_list


def _shared_list(configs: list[NeighborConfig]) -> NeighborConfig | None:
    """The list that serves most: a full COO list if any member wants one, else what the first member wants."""
    if not configs:
        return None
    kinds = [_kind(config) for config in configs]
    full_coo = (NeighborListFormat.COO, False)
    kind = full_coo if full_coo in kinds else kinds[0]
    group = [config for config in configs if _kind(config) == kind]
    return NeighborConfig(
        cutoff=max(config.cutoff for config in group),
        format=kind[0],
        half_list=kind[1],
        skin=max(config.skin for config in group),
    )
