"""Every launch that has a next smaller one, as a user's compiler would refuse the first ones: the results are the same."""

import losses
import npu_offline
import npu_tiling
import pytest
import torch

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not npu_offline.installed(), reason="needs a toolchain: npu-offline fetch"),
]
WIDTH = 16
CASES = {  # a kernel, and a loss that launches it
    "cross_entropy_kernel": {"label_smoothing": 0.1, "return_token_accuracy": True},
    "cross_entropy_exponentials_kernel": {},
    "cross_entropy_statistics_kernel": {"reduction": "none", "return_entropy": True},
    "cross_entropy_gradient_kernel": {"reduction": "none", "softcap": 2.0},
    "cross_entropy_targets_kernel": {"class_weight": True, "label_smoothing": 0.1},
    "cross_entropy_losses_kernel": {"return_lse": True, "return_z_loss": True, "lse_square_scale": 0.1},
    "cross_entropy_coefficients_kernel": {"reduction": "none", "token_scaling": True},
}
VOCABULARIES = {"whole rows": 123, "blocks of a row": 9001}
TIMES = 2
OF_CHUNKS = [name for name in CASES if not name.endswith(("targets_kernel", "losses_kernel", "coefficients_kernel"))]


def refusing(npu_refuse, name, times):
    """Has the first launches of a kernel refused."""
    refused, _ = npu_refuse(lambda kernel, decision: kernel == name and len(refused) < times)
    return refused


@pytest.mark.few(4)
@pytest.mark.uncollected(
    "numbers of rows, whatever the vocabulary is", lambda kernel, length: kernel not in OF_CHUNKS and length != "whole rows"
)
@pytest.mark.uncollected(
    "whole rows on chip are swept twice",
    lambda kernel, length: kernel == "cross_entropy_exponentials_kernel" and length == "whole rows",
)
@pytest.mark.parametrize("length", VOCABULARIES)
@pytest.mark.parametrize("kernel", CASES)
def test_a_smaller_tile_gives_the_same_result(kernel, length, npu_refuse):
    case = losses.make(19, WIDTH, VOCABULARIES[length], seed=3, **CASES[kernel])
    refused = refusing(npu_refuse, kernel, TIMES)
    with npu_offline.emulate("Ascend910B4") as emulation, pytest.warns(RuntimeWarning, match="overflows the Unified Buffer"):
        losses.check(case, losses.run(case, "cpu"), roundings=2)
    assert len(refused) == TIMES
    assert len({repr(decision.tiling) for _, decision in refused}) == TIMES
    assert kernel in {launch.kernel for launch in emulation.launches}


@pytest.mark.parametrize("kernel", ["cross_entropy_statistics_kernel", "cross_entropy_losses_kernel"])
def test_where_no_tile_compiles_the_error_says_so(kernel, npu_refuse):
    case = losses.make(19, WIDTH, 2600, seed=3, **CASES[kernel])
    refusing(npu_refuse, kernel, 100)
    with (
        npu_offline.emulate("Ascend910B4"),
        pytest.warns(RuntimeWarning, match="overflows"),
        pytest.raises(npu_tiling.UnifiedBufferError, match="not even its smallest tile"),
    ):
        losses.run(case, "cpu")


def test_the_tile_that_compiled_is_remembered(npu_refuse):
    case = losses.make(19, WIDTH, 5000)
    refused = refusing(npu_refuse, "cross_entropy_exponentials_kernel", 2)
    with npu_offline.emulate("Ascend910B4"):
        with pytest.warns(RuntimeWarning, match="overflows"):
            first = losses.run(case, "cpu")
        again = losses.run(case, "cpu")  # where warnings are errors
    assert len(refused) == 2
    assert torch.equal(first.gradients["x"], again.gradients["x"])
