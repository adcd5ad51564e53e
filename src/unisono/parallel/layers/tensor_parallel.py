"""The choice of a layout's kind of tensor parallelism."""

from __future__ import annotations

from unisono.parallel.layers.tensor_1d import Tensor1D
from unisono.parallel.layers.tensor_grid import Tensor2D, Tensor3D
from unisono.parallel.training_mesh import TrainingMesh

TensorParallel = Tensor1D | Tensor2D | Tensor3D


def tensor_parallel(mesh: TrainingMesh | None = None) -> TensorParallel:
    """Returns the tensor parallelism (1D, 2D, 2.5D or 3D) of a mesh's layout."""
    if mesh is None or mesh.group("tp") is None or mesh.layout.tensor == "1d":
        return Tensor1D(mesh)
    return (Tensor3D if mesh.layout.tensor == "3d" else Tensor2D)(mesh)
