"""Embeddings for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .autograd import embedding
from .module import Embedding, VocabParallelEmbedding
from .patching import patch

__all__ = ["Embedding", "VocabParallelEmbedding", "embedding", "patch"]
