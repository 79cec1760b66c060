"""What one structure and a batch of structures have in common: named tensors at three levels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data.schema import FIELDS, Level, as_level, kind_matches

_reserved: set[str] = set()


def is_field_name(name: str) -> bool:
    """Whether a field may have this name: a public identifier that is no attribute of a structure or a batch.

    >>> is_field_name("bond_order"), is_field_name("batch_idx"), is_field_name("bond order")
    (True, False, False)
    """
    return name.isidentifier() and not name.startswith("_") and name not in _reserved


class FieldContainer(ABC):
    """Named tensors at node, edge and system level, kept as plain instance attributes.

    Reading ``container.positions`` is an ordinary attribute look-up and costs no more. Setting an attribute checks the
    tensor's leading dimension (and shape and kind for known fields) first.
    """

    # Names of fields live in __dict__ next to these; a field cannot start with an underscore.
    _levels: dict[str, Level]
    _scalars: frozenset[str]

    def __init_subclass__(cls) -> None:
        # A field goes from structure to batch and back, so it must not hide a method of either.
        _reserved.update(dir(cls))

    # ------------------------------------------------------------------ reading
    def __getattr__(self, name: str) -> Any:
        # Reached only when the attribute does not exist.
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._describe()} has no field {name!r}; it has {', '.join(self._levels)}")

    def __getitem__(self, key: str) -> Any:
        if key in self._levels:
            return vars(self)[key]
        raise KeyError(f"{self._describe()} has no field {key!r}; it has {', '.join(self._levels)}")

    def __contains__(self, name: object) -> bool:
        return name in self._levels

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "one AtomicData is not a sequence of structures; its fields are in .keys() and .items()"
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Tensor of a field, or ``default`` where it is absent."""
        return vars(self)[name] if name in self._levels else default

    def keys(self) -> tuple[str, ...]:
        """Names of the fields present, in the order they were added."""
        return tuple(self._levels)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor."""
        return ((name, vars(self)[name]) for name in tuple(self._levels))

    def level(self, name: str) -> Level:
        """Level of a field that is present: ``"node"``, ``"edge"`` or ``"system"``."""
        if name not in self._levels:
            raise KeyError(f"{self._describe()} has no field {name!r}; it has {', '.join(self._levels)}")
        return self._levels[name]

    def model_dump(self) -> dict[str, Tensor]:
        """All fields as a dictionary of name to tensor (not copied)."""
        return dict(self.items())

    @property
    def device(self) -> torch.device:
        """Device of the positions, and so of every field."""
        return vars(self)["positions"].device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the positions."""
        return vars(self)["positions"].dtype

    # ------------------------------------------------------------------ writing
    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            vars(self)[name] = value
        else:
            self.add_key(name, value)

    def __delattr__(self, name: str) -> None:
        self.remove_key(name)

    def add_key(self, key: str, values: Any, level: str | None = None) -> None:
        """Add or replace a field.

        Parameters
        ----------
        key : str
            Name of the field.
        values : Tensor
            The values; the leading dimension must be the number of atoms, edges or systems.
        level : {"node", "atom", "edge", "system"}, optional
            Needed for a name that is neither in the schema table nor present already.

        Raises
        ------
        ValueError
            Unknown name without a level, a level that contradicts the table, wrong shape, dtype or device.
        """
        resolved = self._resolve_level(key, level)
        self._check(key, values, resolved, self._count(resolved))
        self._store(key, values, resolved)

    def remove_key(self, key: str) -> None:
        """Remove a field; ``KeyError`` when it is absent, ``ValueError`` for positions and atomic numbers."""
        self.level(key)
        if key in ("positions", "atomic_numbers"):
            raise ValueError(f"field {key!r} cannot be removed: it says how many atoms there are")
        del vars(self)[key]
        del self._levels[key]
        self._scalars -= {key}

    def _store(self, key: str, values: Tensor, level: Level) -> None:
        vars(self)[key] = values
        self._levels[key] = level

    def _resolve_level(self, key: str, level: str | None) -> Level:
        if not is_field_name(key):
            raise ValueError(
                f"{key!r} cannot name a field: it must be an identifier, without a leading underscore, that is no "
                "attribute of AtomicData or Batch"
            )
        known = FIELDS.get(key)
        if level is None:
            if known is not None:
                return known.level
            if key in self._levels:
                return self._levels[key]
            raise ValueError(
                f"field {key!r} is not in the schema table: say its level ('node', 'edge' or 'system')"
            )
        resolved = as_level(level)
        if known is not None and known.level != resolved:
            raise ValueError(f"field {key!r} is of level {known.level!r} by the schema table, not {level!r}")
        return resolved

    def _check(self, key: str, values: Any, level: Level, count: int | None) -> None:
        """Check one tensor against its row in the table and the leading dimension (``None``: any) of its level."""
        if not isinstance(values, Tensor):
            raise ValueError(f"field {key!r} must be a torch.Tensor, not {type(values).__name__}")
        if values.device != self.device:
            raise ValueError(f"field {key!r} is on {values.device} while the positions are on {self.device}")
        known = FIELDS.get(key)
        if known is not None and not kind_matches(known.kind, values.dtype):
            raise ValueError(
                f"field {key!r} of {self._describe()} must be of kind {known.kind}, got {values.dtype}"
            )
        tail = None if known is None else known.shape
        shape = values.shape
        fits = len(shape) > 0 and (count is None or shape[0] == count)
        if fits and tail is not None:
            fits = len(shape) == len(tail) + 1 and all(
                t is None or t == s for t, s in zip(tail, shape[1:], strict=True)
            )
        if not fits:
            expected = f"[num_{level}s, ...]" if known is None else known.describe_shape()
            rows = "" if count is None else f" with {count} rows"
            raise ValueError(
                f"field {key!r} of {self._describe()} must have shape {expected}{rows}, got {list(shape)}"
            )

    # ------------------------------------------------------------------ for subclasses
    @abstractmethod
    def _count(self, level: Level) -> int | None:
        """Leading dimension of the fields of a level; ``None`` where nothing has fixed it yet."""

    @abstractmethod
    def _describe(self) -> str:
        """Words for this container in error messages."""

    def __copy__(self) -> Self:
        return self._copy_with({})

    def __getstate__(self) -> dict[str, Any]:
        # A view is pickled with all the memory it looks into; one structure of a batch would drag the batch along.
        state = dict(vars(self))
        for name, tensor in self.items():
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                state[name] = tensor.clone()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _copy_with(self, tensors: Mapping[str, Tensor]) -> Self:
        """Copy the structure, with other tensors of the same leading dimensions."""
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        vars(new)["_levels"] = dict(self._levels)
        vars(new).update(tensors)
        return new

    def clone(self) -> Self:
        """Copy whose tensors share no memory with this one; a transposed or expanded tensor becomes contiguous."""
        return self._copy_with(
            {name: t.clone(memory_format=torch.contiguous_format) for name, t in self.items()}
        )

    def detach(self) -> Self:
        """Copy that shares the tensors, outside any autograd graph."""
        return self._copy_with({name: t.detach() for name, t in self.items()})

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """Copy on another device or with another floating-point type.

        Parameters
        ----------
        device : torch.device or str, optional
            Target device.
        dtype : torch.dtype, optional
            Floating-point type; integer and boolean fields keep theirs.
        non_blocking : bool, default False
            As in :meth:`torch.Tensor.to`.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"to() takes a device first; write to(dtype={device})")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, got {dtype}")
        return self._copy_with(
            {
                name: t.to(device, dtype if t.is_floating_point() else None, non_blocking=non_blocking)
                for name, t in self.items()
            }
        )

    def cpu(self) -> Self:
        """Copy in host memory."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """Copy on a CUDA device (the current one by default)."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def pin_memory(self) -> Self:
        """Copy in page-locked host memory, for asynchronous transfers to a GPU."""
        return self._copy_with({name: t.pin_memory() for name, t in self.items()})
