"""PyTorch programs, made by PyTorch itself, in the folders in which Triton has them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings that TorchScript is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Pair(torch.nn.Module):
    """Two inputs, two outputs, of which the second follows from the first input only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x) + self.layer(2 * y), x.sum(1, keepdim=True)


class Dictionary(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": tensors["a"] + tensors["b"], "difference": tensors["a"] - tensors["b"]}


class Optional(torch.nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x if bias is None else x + bias


class Raising(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise RuntimeError("negative numbers are refused")
        return x * 2


class Wide(torch.nn.Module):
    """Sixteen times as many bytes of output as of input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 16)


class Everything(torch.nn.Module):
    """Returns what it gets, of any type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def tensors(inputs: dict[str, str], outputs: dict[str, str], batch: int = 64) -> str:
    """Return the part of a configuration that describes tensors. inputs, outputs: name -> "TYPE_FP32 dims: [ 4 ]"."""
    text = f"max_batch_size: {batch}\n"
    for kind, given in (("input", inputs), ("output", outputs)):
        text += "".join(f'{kind} [ {{ name: "{name}" data_type: {each} }} ]\n' for name, each in given.items())
    return text


FOUR, TWO, ONE = (f"TYPE_FP32 dims: [ {size} ]" for size in (4, 2, 1))


def folder(root: Path, name: str, config: str, file: str = "model.pt") -> Path:
    """Make the folder of a model with one version; return the path for its file."""
    path = root / name / "1" / file
    path.parent.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    return path


def script(root: Path, name: str, module: torch.nn.Module, config: str, *, platform: str = "pytorch_libtorch") -> Path:
    """Write a module as TorchScript."""
    path = folder(root, name, f'platform: "{platform}"\n{config}')
    with quiet():
        torch.jit.script(module.eval()).save(str(path))
    return path


def exported(module: torch.nn.Module, *shape: int) -> torch.export.ExportedProgram:
    """Export a module with two inputs of these rows, whose batch is free."""
    example = (torch.rand(2, *shape), torch.rand(2, *shape))
    free = torch.export.Dim("batch", min=1, max=1024)
    with quiet():
        return torch.export.export(module.eval(), example, dynamic_shapes=({0: free}, {0: free}))
