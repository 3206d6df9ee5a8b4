"""Embeddings for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .autograd import embedding
from .module import Embedding, VocabParallelEmbedding

__all__ = ["Embedding", "VocabParallelEmbedding", "embedding"]
