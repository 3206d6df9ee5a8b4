"""Embeddings for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import Embedding, embedding
from .bags import EmbeddingBag, embedding_bag
from .explain import explain
from .ngram import NGramEmbedding, ngram_embedding
from .patching import patch
from .vocab_parallel import VocabParallelEmbedding

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "NGramEmbedding",
    "VocabParallelEmbedding",
    "embedding",
    "embedding_bag",
    "explain",
    "ngram_embedding",
    "patch",
]
