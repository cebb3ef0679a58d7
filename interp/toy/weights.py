"""Weights of a toy on disk: one safetensors file that holds its configuration too."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from interp.errors import InputError
from interp.toy.config import ToyConfig
from interp.toy.vlm import ToyVLM


def to_bytes(model: ToyVLM, *, dtype: torch.dtype = torch.float32) -> bytes:
    """The file's content; the same weights always give the same bytes."""
    tensors = {k: v.to("cpu", dtype).contiguous() for k, v in model.raw.state_dict().items()}
    return save(tensors, {"config": json.dumps(asdict(model.config), sort_keys=True)})


def load(path: str | Path, *, device: str = "cpu") -> ToyVLM:
    """A model from a file that `to_bytes` made; half precision is widened to single.

    Raises:
        InputError: no such file, one that is cut short or is no such weights, or weights that do
            not fit the configuration beside them or are not finite.
    """
    path = Path(path)
    config, tensors = _read(path)
    model = ToyVLM(config, source=str(path))
    want = {k: tuple(v.shape) for k, v in model.raw.state_dict().items()}
    have = {k: tuple(v.shape) for k, v in tensors.items()}
    if want != have:
        key = sorted(set(want.items()) ^ set(have.items()))[0][0]
        raise InputError(
            f"{path}: {key} is {have.get(key, 'missing')}, its configuration needs"
            f" {want.get(key, 'no such tensor')}; the file is not whole, get it again"
        )
    broken = [k for k, v in tensors.items() if not v.isfinite().all()]
    if broken:
        raise InputError(f"{path}: {broken[0]} holds values that are not finite; get it again")
    model.raw.load_state_dict(tensors)
    return model.to(device)


def _read(path: Path) -> tuple[ToyConfig, dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {k: file.get_tensor(k).float() for k in file.keys()}  # noqa: SIM118
        return ToyConfig.from_dict(json.loads(metadata["config"])), tensors
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error}); name a weights file") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: no toy weights, or cut short ({type(error).__name__}: {error}); get it again"
        ) from None
