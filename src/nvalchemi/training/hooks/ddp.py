"""Data-parallel training in several processes."""

import atexit
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from nvalchemi.data.loader import DataLoader as BatchLoader
from nvalchemi.hooks import TrainContext
from nvalchemi.training._ranks import distributed, rank, world_size
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training.building import configs_by_model

_log = logging.getLogger("nvalchemi.training")


class DDPHook(BaseModel):
    """Train in several processes, started by ``torchrun``; every one sees its share of the data.

    Parameters
    ----------
    backend : str, optional
        Backend of ``torch.distributed``; default ``"nccl"`` on CUDA, else ``"gloo"``.
    find_unused_parameters : bool, default False
        For models that leave out parameters in some batches; costs time.
    seed : int, default 0
        Seed of the order of the data, the same on all ranks.
    divide_data : bool, default True
        Divide the data among the ranks; ``False`` when each rank loads only its own share. All ranks need the
        same number of batches in training.

    Notes
    -----
    At ``SETUP`` the models that are trained are wrapped in
    :class:`~torch.nn.parallel.DistributedDataParallel` and the validation data divided, each structure or
    batch going to one rank. At ``BEFORE_TRAINING`` the training data are divided: the sampler of a torch
    ``DataLoader`` is replaced by a :class:`~torch.utils.data.DistributedSampler`, which repeats some
    structures so that all ranks make the same number of batches; the batches of a
    :class:`nvalchemi.data.loader.DataLoader` and of a list are dealt out in turn, some of them repeated
    likewise. Each epoch has an order of its own.

    In a single process that was not started by ``torchrun`` the hook does nothing.

    Examples
    --------
    >>> DDPHook(backend="gloo").find_unused_parameters
    False
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    frequency: ClassVar[int] = 1
    stage: ClassVar[None] = None

    backend: str | None = None
    find_unused_parameters: bool = False
    seed: int = 0
    divide_data: bool = True

    def _runs_on_stage(self, stage: Any) -> bool:
        return stage in (TrainingStage.SETUP, TrainingStage.BEFORE_TRAINING)

    def __call__(self, ctx: TrainContext, stage: Any) -> None:
        """Join the processes and wrap; divide the data."""
        strategy = ctx.workflow
        if stage is TrainingStage.SETUP:
            self._join(strategy.devices[0])
            if not distributed():
                _log.info("DDPHook has nothing to do: not started by torchrun")
                return
            trained = configs_by_model(strategy.optimizer_configs, strategy.model_dict)
            for key, model in strategy.model_dict.items():
                if key in trained and any(parameter.requires_grad for parameter in model.parameters()):
                    strategy.wrap_model(key, self._wrap(model, strategy.devices[0]))
            config = strategy.validation_config
            if config is not None and self.divide_data:
                data = divide(config.validation_data, seed=self.seed, evenly=False)
                strategy.validation_config = config.model_copy(update={"validation_data": data})
        elif self.divide_data and distributed():
            strategy.dataloader = divide(strategy.dataloader, seed=self.seed, evenly=True)

    def _join(self, device: torch.device) -> None:
        if distributed() or "RANK" not in os.environ:
            return
        dist.init_process_group(self.backend or ("nccl" if device.type == "cuda" else "gloo"))
        atexit.register(_leave)

    def _wrap(self, model: torch.nn.Module, device: torch.device) -> DistributedDataParallel:
        return DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device],
            find_unused_parameters=self.find_unused_parameters,
        )


def _leave() -> None:
    if distributed():
        dist.destroy_process_group()


def divide(data: Iterable[Any], *, seed: int = 0, evenly: bool) -> Iterable[Any]:
    """Share of this rank in a ``DataLoader`` (this package's or torch's) or a list of batches.

    Parameters
    ----------
    data : DataLoader or sequence of Batch
        All data.
    seed : int, default 0
        Seed of the order, where the loader shuffles.
    evenly : bool
        Repeat some, so that all ranks have the same number, as training needs; else every one is on exactly
        one rank, as metrics need.

    Raises
    ------
    TypeError
        Data that cannot be divided here.
    """
    if isinstance(data, DataLoader):
        if isinstance(data.sampler, DistributedSampler):
            return data
        if data.batch_size is None or not isinstance(data.sampler, RandomSampler | SequentialSampler):
            raise TypeError(
                "a DataLoader with a sampler of its own cannot be divided: give it a DistributedSampler"
            )
        return _with_sampler(data, _sampler_of(data, seed, evenly))
    if isinstance(data, BatchLoader):
        if data.world_size not in (1, world_size()):
            raise ValueError(
                f"the loader is divided among {data.world_size} ranks, the process group has {world_size()}"
            )
        data.divide(rank(), world_size(), even=evenly)
        return data
    if isinstance(data, Sequence):
        numbers = list(range(len(data)))
        if evenly:
            numbers += numbers[: -len(numbers) % world_size()]
        return [data[i] for i in numbers[rank() :: world_size()]]
    raise TypeError(
        f"{type(data).__name__} cannot be divided among ranks: give a DataLoader or a list of batches, or let each "
        "rank load its own share and use DDPHook(divide_data=False)"
    )


def _sampler_of(loader: DataLoader[Any], seed: int, evenly: bool) -> Sampler[int] | list[int]:
    dataset: Any = loader.dataset
    if not evenly:
        return list(range(rank(), len(dataset), world_size()))
    shuffle = isinstance(loader.sampler, RandomSampler)
    return DistributedSampler(dataset, shuffle=shuffle, seed=seed, drop_last=loader.drop_last)


def _with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
