"""Embeddings for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import embedding
from .explain import explain
from .module import Embedding
from .ngram import ngram_embedding
from .ngram_module import NGramEmbedding
from .patching import patch
from .vocab_parallel import VocabParallelEmbedding

__all__ = ["Embedding", "NGramEmbedding", "VocabParallelEmbedding", "embedding", "explain", "ngram_embedding", "patch"]
