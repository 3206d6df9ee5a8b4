"""Embeddings for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import embedding
from .explain import explain
from .module import Embedding, VocabParallelEmbedding
from .patching import patch

__all__ = ["Embedding", "VocabParallelEmbedding", "embedding", "explain", "patch"]
