"""Embeddings for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import embedding
from .bags import embedding_bag
from .explain import explain
from .module import Embedding, EmbeddingBag
from .ngram import ngram_embedding
from .ngram_module import NGramEmbedding
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
