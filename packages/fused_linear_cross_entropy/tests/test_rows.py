"""The arithmetic on rows in kernels, against its definition in fp64: of any vectors, without logits that they came from."""

import npu_offline
import npu_tiling
import pytest
import torch
from npu_fused_linear_cross_entropy import call as rows
from npu_fused_linear_cross_entropy.call import Forward, LinearCrossEntropyOutput, Options
from npu_fused_linear_cross_entropy.loss import TargetFacts, kernels, reference
from npu_fused_linear_cross_entropy.loss.rows import RowKernel, row_tiling
from npu_tiling import device_for
from npu_tiling.plans import Plan

from testing.steps import run_once

VOCABULARY = 1000
OUTSIDE = (-1, VOCABULARY, 2**31, 2**32 + 5, -(2**63), 2**63 - 1, -3)  # targets that no row of the weight has
UNIT = 2.0**-24  # unit roundoff of fp32
SCALED = {"label_smoothing": 0.1, "lse_square_scale": 0.3, "token_scaling": True}
EXTRAS = {"return_token_accuracy": True, "return_predicted_tokens": True, "return_lse": True, "return_z_loss": True}
CASES = {  # tokens, options, class weights, what "mean" is divided by, the scale of a gradient that is finished later
    "plain": (37, {}, None, None, None),
    "no rows": (0, {"return_token_accuracy": True}, None, None, None),
    "a sum": (1500, {"reduction": "sum", "return_z_loss": True}, None, None, None),
    "each row": (1030, {"reduction": "none", "return_entropy": True, **EXTRAS, **SCALED}, torch.float32, None, None),
    "a given number": (37, {"label_smoothing": 0.2}, None, torch.tensor(17), 1.0),
    "class weights": (37, {"return_z_loss": True}, torch.bfloat16, None, None),
    "class weights, smoothing": (130, {**EXTRAS, **SCALED}, torch.float32, None, 0.25),
    "many rows": (5001, {**EXTRAS, **SCALED}, torch.float32, None, 0.25),
    "many rows, each": (5001, {"reduction": "none", "return_token_accuracy": True}, None, None, None),
    "a far ignore_index": (70, {"ignore_index": 2**31 - 1}, None, None, None),
    "an ignore_index inside": (70, {"ignore_index": 7}, torch.float32, torch.tensor(3.5), None),
}
TELLING = ("plain", "each row", "class weights, smoothing", "many rows", "a far ignore_index")


def options_of(changes):
    return Options(**changes, vocab_size=VOCABULARY)


def make(name):
    tokens, changes, weights, _, _ = CASES[name]
    options, generator = options_of(changes), torch.Generator().manual_seed(tokens)
    target = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    target[1::5] = options.ignore_index
    if options.reduction == "none":  # the loss of such a row is NaN
        target[2::7] = torch.tensor(OUTSIDE).repeat(tokens)[: len(target[2::7])]
    class_weight = None if weights is None else (torch.rand(VOCABULARY, generator=generator) * 2).to(weights)
    statistics = torch.randn(rows.STATISTICS, tokens, generator=generator)
    statistics[rows.SUM] = 1.0 + VOCABULARY * torch.rand(tokens, generator=generator)
    statistics[rows.TOTAL] *= VOCABULARY
    statistics[rows.WEIGHT] = statistics[rows.TOTAL].abs()
    statistics[rows.DOT] *= statistics[rows.SUM]
    statistics[rows.PLACE] = torch.where(torch.arange(tokens) % 3 == 0, target, 11).clamp(0, VOCABULARY - 1).float()
    return target, class_weight, statistics, options


def near(actual, wanted, size=10.0):
    """Within a few roundings of terms of that size; NaN where it must be."""
    assert (actual is None) == (wanted is None)
    if wanted is not None:
        actual = actual.cpu().double()
        assert torch.equal(actual.isnan(), wanted.isnan())
        error = (actual - wanted).abs().nan_to_num()
        assert (error <= 64 * UNIT * (size + wanted.abs().nan_to_num())).all(), float(error.max())


def facts_of(on, chip, tensors, options, dtype, scale):
    """Facts of targets, given class weights and a divisor, by kernels or by the definition."""
    return TargetFacts(*run_once(lambda p, *slots: on.target_facts(p, *slots, options, dtype, scale), chip, *tensors))


def losses_of(on, chip, facts, statistics, options, shape):
    nothing = (None, None, None, None, None)
    x, weight, target = (torch.empty(each, dtype=statistics.dtype, device="meta") for each in ((*shape, 1), (2, 1), shape))
    call = Forward(x, weight, target, *nothing, options)

    def write(p, statistics, *facts):
        outputs = outputs_of(p, call)
        on.losses(p, TargetFacts(*facts), statistics, options, outputs)
        return outputs

    return run_once(write, chip, statistics, *facts)


def outputs_of(p, call):
    return [p.new(call.results()[name]) for name in LinearCrossEntropyOutput._fields]


def coefficients_of(on, chip, facts, statistics, options, *upstream):
    tensors = [each if isinstance(each, torch.Tensor) else None for each in upstream]

    def write(p, statistics, *slots):
        given = [each if slot is None else slot for each, slot in zip(upstream, slots[-2:], strict=True)]
        return (on.coefficients(p, TargetFacts(*slots[:-2]), statistics, options, *given),)

    return run_once(write, chip, statistics, *facts, *tensors)[0]


def check(name, place):
    """Every output and factor of a case at a place."""
    device = device_for(place)
    target, class_weight, statistics, options = make(name)
    given = [None if t is None else t.to(place) for t in (target, class_weight, statistics)]
    exact = [None if class_weight is None else class_weight.double(), statistics.double()]
    divisor, scale = CASES[name][3:]
    wanted = facts_of(reference, None, (target, exact[0], divisor), options, torch.float64, scale)
    found = facts_of(kernels, device, (*given[:2], divisor), options, torch.float32, scale)
    assert torch.equal(found.columns.cpu(), wanted.columns)
    near(found.target_weight, wanted.target_weight)
    used = [0, 1, 3] if class_weight is None or not options.smoothed else [0, 1, 2, 3]
    for ours, theirs in ((found.factors, wanted.factors), (found.gradient_factors, wanted.gradient_factors)):
        near(ours.flatten()[used], theirs.flatten()[used], 0.0)
    near(found.unfinished, wanted.unfinished, 0.0)
    size = 10.0 * (1 + VOCABULARY * options.lse_square_scale / 10)
    outputs = losses_of(kernels, device, found, given[2], options, target.shape)
    for ours, theirs in zip(outputs, losses_of(reference, None, wanted, exact[1], options, target.shape), strict=True):
        near(ours, theirs, size * (len(target) if options.reduction == "sum" else 1))
    for dloss, dentropy in upstream(target, options):
        theirs = coefficients_of(reference, None, wanted, exact[1], options, moved(dloss), moved(dentropy))
        ours = coefficients_of(kernels, device, found, given[2], options, moved(dloss, place), moved(dentropy, place))
        read = 5 if options.return_entropy else 4
        near(ours[:read], theirs[:read])


def moved(value, place=None):
    """In fp64, or at a place."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.double() if place is None else value.to(place)


def upstream(target, options):
    """Gradients of losses and entropies, one for each row or one of all."""
    one, each = torch.tensor(0.7), torch.rand(len(target), generator=torch.Generator().manual_seed(1))
    if options.return_entropy:
        yield from ((None, each), (each, one), (one.expand(len(target)), None))
    else:
        yield (each if options.reduction == "none" else 1.0), None


def check_join(ranks, tokens, place):
    """Joins ranks' statistics into a view, and checks that its surroundings are untouched."""
    generator = torch.Generator().manual_seed(tokens)
    parts = torch.randn(ranks, rows.STATISTICS, tokens, generator=generator)
    parts[:, rows.SUM] = 1.0 + VOCABULARY * torch.rand(ranks, tokens, generator=generator)
    parts[:, rows.WEIGHT] = VOCABULARY * torch.rand(ranks, tokens, generator=generator)
    parts[:, rows.DOT] *= parts[:, rows.SUM]
    parts[:, rows.PLACE] = torch.randint(0, VOCABULARY, (ranks, tokens), generator=generator).float()
    parts[:, rows.MAXIMUM, 1::4] = parts[:1, rows.MAXIMUM, 1::4]  # equal maxima: the first column, whichever rank has it
    parts[0, rows.MAXIMUM, 2::4] = -3.0e38  # a rank whose logits are all minus infinity
    parts[0, rows.SUM, 2::4] = parts[0, rows.DOT, 2::4] = parts[0, rows.WEIGHT, 2::4] = 0.0
    wanted = torch.empty(rows.STATISTICS, tokens, dtype=torch.float64)
    run_once(reference.join, None, parts.double(), wanted)
    whole = torch.full((rows.STATISTICS, tokens + 7), torch.nan, device=place)
    run_once(kernels.join, device_for(place), parts.to(place), whole[:, 3 : 3 + tokens])
    near(whole[:, 3 : 3 + tokens], wanted, size=10.0 * VOCABULARY)
    assert torch.equal(whole[rows.PLACE, 3 : 3 + tokens].cpu().double(), wanted[rows.PLACE])
    assert torch.equal(whole[rows.MAXIMUM, 3 : 3 + tokens].cpu().double(), wanted[rows.MAXIMUM])
    assert whole[:, :3].isnan().all() and whole[:, 3 + tokens :].isnan().all()


@pytest.mark.uncollected("the definition is what runs on a CPU", lambda place: place == "cpu")
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 37), (2, 0), (2, 1030), (3, 5001), (8, 65)])
def test_statistics_of_ranks_become_those_of_all_columns(device, ranks, tokens):
    if device_for(device.torch) is None:
        pytest.skip("the definition is what runs on a CPU")
    check_join(ranks, tokens, device.torch)


@pytest.mark.uncollected("the definition is what runs on a CPU", lambda place: place == "cpu")
@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_what_the_definition_gives(device, name):
    if device_for(device.torch) is None:
        pytest.skip("the definition is what runs on a CPU")
    check(name, device.torch)


@pytest.mark.few(3)
@pytest.mark.compilers
@pytest.mark.skipif(
    len(npu_offline.installed()) < 3, reason="needs triton-ascend and the three toolchains (npu-offline fetch)"
)
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize("name", TELLING)
def test_final_modules_give_what_the_definition_gives(name, toolchain):
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True):
        check(name, torch.device("cpu"))
        check_join(3, CASES[name][0], torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sums_over_rows_are_the_same_bits_every_time(device, dtype):
    """Also where several programs leave partial sums."""
    place = device_for(device.torch)
    if place is None:
        pytest.skip("the definition is what runs on a CPU")
    target, class_weight, statistics, options = (
        t.to(device.torch) if isinstance(t, torch.Tensor) else t for t in make("many rows")
    )
    found = []
    for _ in range(2):
        prepared = facts_of(kernels, place, (target.to(dtype), class_weight, None), options, torch.float32, None)
        found.append((prepared.factors, *losses_of(kernels, place, prepared, statistics, options, target.shape)[:3]))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_few_rows_take_one_program_and_many_one_for_each_core():
    chip = npu_tiling.soc("Ascend910B4")
    launch = row_tiling(RowKernel.LOSSES, chip)
    rows = launch.constants["BLOCK_M"]
    assert launch.grid_of_sums(0) == launch.grid_of_sums(4 * rows) == 1
    assert launch.grid_of_sums(4 * rows + 1) == launch.grid(4 * rows + 1) == 5
    assert launch.grid_of_sums(10**6) == chip.vector_cores


@pytest.mark.parametrize("kernel", [each for each in RowKernel if each is not RowKernel.WEIGHTED_TARGETS], ids=str)
def test_a_tiling_in_place_of_a_refused_one_has_programs_of_its_own(kernel):
    chip, options = npu_tiling.soc("Ascend910B4"), options_of({"return_token_accuracy": True})
    refused = row_tiling(kernel, chip)
    smaller, tokens = refused.smaller(), 8 * refused.per_program
    p = Plan(chip, replaced={(kernel.function, refused): smaller})
    target, statistics = p.argument(torch.empty(tokens, dtype=torch.int64)), p.argument(torch.empty(7, tokens))
    facts = kernels.target_facts(p, target, None, None, options, torch.float32, None)
    outputs = outputs_of(p, Forward(*[torch.empty(tokens, 1)] * 3, *[None] * 5, options))
    kernels.losses(p, facts, statistics, options, outputs)
    kernels.coefficients(p, facts, statistics, options, 1.0, None)
    kernels.join(p, p.argument(torch.empty(2, 7, tokens)), statistics)
    (launch,) = (each for each in p.launches if each.kernel == kernel.function)
    assert launch.grid == smaller.grid(tokens) == 2 * refused.grid(tokens)
