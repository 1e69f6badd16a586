"""The versioned weight store: weights travel from the trainer to the policy as whole versions."""

from forgelite.weights.directory import Directory, TorchstoreDirectory, start_directory, stop_directory
from forgelite.weights.manifest import Manifest, TensorInfo
from forgelite.weights.segment import reclaim
from forgelite.weights.store import SHARED_MEMORY, WeightStore
from forgelite.weights.torchstore_compat import torchstore_environment

__all__ = [
    "SHARED_MEMORY",
    "Directory",
    "Manifest",
    "TensorInfo",
    "TorchstoreDirectory",
    "WeightStore",
    "reclaim",
    "start_directory",
    "stop_directory",
    "torchstore_environment",
]
