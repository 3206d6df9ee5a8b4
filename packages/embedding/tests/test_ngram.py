"""The n-gram look-up against its definition in Python's own integers, and its gradient in fp64."""

import ngrams
import pytest
import torch
from npu_embedding import NGramEmbedding, ngram_embedding

pytestmark = pytest.mark.usefixtures("npu_poisoned")
OPS = torch.ops.npu_embedding


# Several tiles of a sequence; tokens fewer than an n-gram; rows that are no multiple of 32 bytes; columns in blocks.
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("shape", "width", "dtype", "options"),
    [
        ((2, 300), 32, torch.bfloat16, {}),
        ((3, 1, 2), 160, torch.float32, {"history": True}),
        ((2, 9), 7, torch.float32, {"history": True, "mix": "sum", "fill": 0}),
        ((40,), 32, torch.float16, {"ngram_size": 4, "heads": 1}),
        ((2, 70), 32, torch.bfloat16, {"own": True, "mix": "sum", "fill": 0, "ngram_size": 4, "history": True}),
        ((2, 9), 7, torch.float32, {"own": True, "mode": "sum"}),
        ((2, 9), 123, torch.bfloat16, {"ngram_size": 2, "mode": "sum"}),
        ((3, 37), 64, torch.float32, {"history": True, "mode": "sum"}),
        ((3,), 16411, torch.float32, {"heads": 1}),
    ],
)
def test_rows_and_gradient(device, shape, width, dtype, options):
    case = ngrams.make(shape, width, dtype, **options)
    ngrams.check(case, ngrams.run(case, device.torch))


@pytest.mark.few(2)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mix", ["xor", "sum"])
def test_products_are_those_of_64_bit_integers(device, index_dtype, mix):
    """Products past 2^63, ids below 0, and sizes from 1 to almost 2^30: of a table whose rows are all the same memory."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-(2**31), 2**31, (3, 50), generator=generator)
    ids[:, ::7] = 7
    factors = torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator)
    sizes = torch.tensor([1, 2, 3, 2047, 2048, 2**30 - 35, 20_000_003, 2**30 - 1])
    table = torch.zeros(1, 32, device=device.torch).expand(2**30 - 1, 32)
    offsets = torch.zeros_like(sizes)
    numbers = (each.to(device.torch) for each in (factors, sizes, offsets))
    _, rows = OPS.ngram(ids.to(index_dtype).to(device.torch), None, table, *numbers, 7, 7, mix == "sum", True, False)
    assert torch.equal(rows.cpu().long(), ngrams.rows_of(ids, None, factors, sizes, offsets, 7, 7, mix))


@pytest.mark.few(0)
def test_history_continues_a_text(device):
    case = ngrams.make((2, 20), 32, torch.float32)
    whole, _ = ngrams.run(case, device.torch)
    parts, history = [], None
    for first, last in ((0, 5), (5, 6), (6, 7), (7, 20)):
        given = (each.to(device.torch) for each in (case.ids[:, first:last], case.table, *case.numbers))
        parts.append(ngram_embedding(*given, case.eos, 3, history))
        history = case.ids[:, last - 2 : last].to(device.torch)
    assert torch.equal(torch.cat(parts, 1).cpu(), whole)


@pytest.mark.few(0)
def test_longcats_hash(device):
    """Sums of ids times powers of the vocabulary's size, modulo each head's: 64 bits do not hold the products."""
    vocabulary, ngram_size, eos = 131072, 4, 2
    sizes = [10_000_019 + 2 * head for head in range(2 * (ngram_size - 1))]
    powers = [[pow(vocabulary, k, size) for k in range(ngram_size)] for size in sizes]
    ids = torch.randint(3, vocabulary, (2, 40))
    ids[:, 11::13] = eos
    table = torch.zeros(1, 8).expand(10_000_100, 8).to(device.torch)
    numbers = (torch.tensor(each, device=device.torch) for each in (powers, sizes, [0] * len(sizes)))
    _, rows = OPS.ngram(ids.to(device.torch), None, table, *numbers, eos, 0, True, True, False)
    for head, size in enumerate(sizes):
        for text, found in zip(ids.tolist(), rows[head].tolist(), strict=True):
            for place, row in enumerate(found):
                start = max((i for i in range(place) if text[i] == eos), default=-1) + 1
                last = text[start : place + 1][::-1][: 2 + head // 2]
                assert row == sum(token * vocabulary**k for k, token in enumerate(last)) % size


def test_same_bits_every_time_dense_and_sparse(device):
    case = ngrams.make((4, 60), 32, torch.float32, base=5)  # small tables: rows that many n-grams name
    case.dy *= 10 ** torch.randint(-4, 5, case.dy.shape)
    out, dense = ngrams.run(case, device.torch)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip((out, dense), ngrams.run(case, device.torch), strict=True))
    sparse, again = (ngrams.run(case, device.torch, sparse=True)[1] for _ in range(2))
    assert sparse.is_sparse and sparse._nnz() == case.ids.numel() * 4
    assert torch.equal(sparse.to_dense(), again.to_dense())
    # On Ascend the sums of a row that several cores share are cut elsewhere.
    assert torch.allclose(sparse.to_dense(), dense, rtol=1e-5, atol=1e-6 * float(dense.abs().max()))


def test_heads_that_the_table_does_not_have(device):
    case = ngrams.make((2, 9), 32, torch.float32)
    case.offsets[1] = len(case.table) - 1
    if device.name == "cpu":
        with pytest.raises(
            ValueError, match=r"sizes\[1\] and offsets\[1\] are 99 and \d+ and must name rows of table, from 0"
        ):
            ngrams.run(case, device.torch)
        return
    out, dtable = ngrams.run(case, device.torch)
    assert out.view(2, 9, 4, 32).isnan().all(-1).all(0).all(0).tolist() == [False, True, False, False]
    assert dtable.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0)])
def test_no_ids_and_no_columns(device, shape):
    for shape_, width in ((shape, 32), ((2, 3), 0)):
        case = ngrams.make(shape_, width, torch.float32)
        out, dtable = ngrams.run(case, device.torch)
        assert out.shape == (*shape_, 4 * width)
        assert torch.equal(dtable, torch.zeros_like(case.table))


@pytest.mark.few(0)
def test_module_has_the_tables_of_qwen(device):
    module = NGramEmbedding(1000, 64, 7, heads_per_ngram=2, table_size=97, layer_index=1, divisible_by=128).to(device.torch)
    assert list(module.state_dict()) == [
        "layer_multipliers",
        "ngram_heads_vocab_sizes",
        "ngram_heads_offsets",
        "ngram_embedding.weight",
    ]
    assert module.ngram_heads_vocab_sizes.tolist() == [109, 113, 127, 131]  # the fifth prime from 97 on, and three more
    assert module.ngram_heads_offsets.tolist() == [0, 109, 222, 349]
    assert module.ngram_embedding.weight.shape == (512, 16)
    assert all(number % 2 and number * 999 < 2**63 for number in module.layer_multipliers.tolist())
    ids = torch.randint(0, 1000, (2, 6), device=device.torch)
    assert torch.equal(module(ids)[:, 3:], module(ids[:, 3:], ids[:, 1:3]))


def test_module_made_without_memory_has_its_numbers_after_a_reset():
    """As FSDP and torchtitan make models: each module fills in its own parameters and buffers."""
    options = {"heads_per_ngram": 2, "table_size": 97, "layer_index": 1}
    with torch.device("meta"):
        module = NGramEmbedding(1000, 64, 7, **options)
    module.to_empty(device="cpu")
    for buffer in module.buffers():
        buffer.fill_(2**62)
    for each in module.modules():
        each.reset_parameters()
    whole = NGramEmbedding(1000, 64, 7, **options)
    assert dict(whole.named_buffers()).keys() == dict(module.named_buffers()).keys()
    assert all(torch.equal(buffer, module.get_buffer(name)) for name, buffer in whole.named_buffers())
    assert module.ngram_embedding.weight.std() > 0.5


IDS, TABLE, GOOD = torch.tensor([[1, 2]]), torch.randn(20, 4), ([3, 5, 7], [5, 5], [0, 5], 0, 3)
WRONG = {
    "ids is torch.float32 and must be torch.int32 or torch.int64": (TypeError, {"ids": IDS.float()}),
    r"ids has shape \(\) and must have a last dimension": (ValueError, {"ids": IDS[0, 0]}),
    "table has shape": (ValueError, {"table": TABLE[0]}),
    "multipliers is a float and must be a tensor, or a sequence": (TypeError, {"multipliers": 1.0}),
    r"multipliers\[0\] is 0.5 and must be a whole number": (ValueError, {"multipliers": [0.5, 1, 1]}),
    r"multipliers has shape \(2,\) and must have shape \(3,\)": (ValueError, {"multipliers": [1, 2]}),
    r"multipliers has shape \(3, 3\) and must have shape \(2, 3\)": (ValueError, {"multipliers": torch.ones(3, 3).long()}),
    r"multipliers has shape \(3, 3\) and": (ValueError, {"multipliers": [[1, 2, 3]] * 3}),
    r"multipliers\[1\] has shape \(2,\) and must have shape \(3,\)": (ValueError, {"multipliers": [[1, 2, 3], [1, 2]]}),
    r"multipliers\[1\]\[0\] is 0.5 and must be": (ValueError, {"multipliers": [[1, 2, 3], [0.5, 1, 1]]}),
    r"multipliers\[1\] is 9223372036854775808 and must be from -9223": (ValueError, {"multipliers": [1, 2**63, 1]}),
    "ids is torch.sparse_coo": (TypeError, {"ids": IDS.to_sparse()}),
    "sizes is torch.sparse_coo": (TypeError, {"sizes": torch.ones(2).long().to_sparse()}),
    "history is torch.sparse_coo": (TypeError, {"history": torch.ones(1, 2).long().to_sparse()}),
    r"sizes has shape \(1, 2\) and must have one dimension": (ValueError, {"sizes": torch.ones(1, 2).long()}),
    "sizes has 3 numbers and must have a multiple of ngram_size - 1, 2": (ValueError, {"sizes": [1, 2, 3]}),
    "sizes is torch.int32 and must be torch.int64": (TypeError, {"sizes": torch.ones(2, dtype=torch.int32)}),
    r"offsets has shape \(1,\) and must have shape \(2,\)": (ValueError, {"offsets": [0]}),
    "eos is 4294967296 and must be from": (ValueError, {"eos": 2**32}),
    "ngram_size is 1 and must be a whole number of at least 2": (ValueError, {"ngram_size": 1}),
    r"history has shape \(1, 3\) and must have shape \(1, 2\)": (ValueError, {"history": torch.ones(1, 3).long()}),
    "history is torch.int32 and must be torch.int64": (TypeError, {"history": torch.ones(1, 2).int()}),
    "mode is 'mean' and must be one of 'concat', 'sum'": (ValueError, {"mode": "mean"}),
    "mix is 1 and must be one of 'xor', 'sum'": (ValueError, {"mix": 1}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    kind, wrong = WRONG[message]
    names = ("ids", "table", "multipliers", "sizes", "offsets", "eos", "ngram_size")
    with pytest.raises(kind, match=message):
        ngram_embedding(**{**dict(zip(names, (IDS, TABLE, *GOOD), strict=True)), **wrong})


WRONG_OF_MODULES = {
    "vocab_size is 'a' and must be a whole number": (TypeError, {"vocab_size": "a"}),
    "embedding_dim is 9 and must be a multiple of 2": (ValueError, {"embedding_dim": 9}),
    "eos is 'x' and must be a whole number": (TypeError, {"eos": "x"}),
    "eos is 1099511627776 and must be from -2147483648": (ValueError, {"eos": 2**40}),
    "divisible_by is 0 and must be a whole number of at least 1": (ValueError, {"divisible_by": 0}),
    "divisible_by is 1.5 and must be a whole number": (ValueError, {"divisible_by": 1.5}),
    "seed is 's' and must be a whole number": (TypeError, {"seed": "s"}),
    "layer_index is 'q' and must be a whole number": (TypeError, {"layer_index": "q"}),
    "layer_index is -1 and must be a whole number of at least 0": (ValueError, {"layer_index": -1}),
    "sparse is 3 and must be True or False": (TypeError, {"sparse": 3}),
}


@pytest.mark.parametrize("message", WRONG_OF_MODULES)
def test_wrong_arguments_of_the_module_are_named(message):
    kind, wrong = WRONG_OF_MODULES[message]
    good = {"vocab_size": 100, "embedding_dim": 8, "eos": 0, "heads_per_ngram": 1, "table_size": 11}
    with pytest.raises(kind, match=message):
        NGramEmbedding(**{**good, **wrong})
