import pytest
import torch

from testing.memory import guarded, poisoned


def test_poisoned_memory_is_nan_or_the_largest_integer_and_ends():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(100).isnan().all()
        assert torch.empty_like(torch.zeros(8, dtype=torch.bfloat16)).isnan().all()
        assert (torch.empty(100, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_poison_does_not_change_the_settings_it_found():
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with pytest.raises(ZeroDivisionError), poisoned():
            raise ZeroDivisionError
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_guard_finds_a_write_on_either_side(dtype):
    tensor, check = guarded((3, 5), dtype)
    assert tensor.shape == (3, 5)
    tensor.fill_(7)
    check()
    around = torch.as_strided(tensor, (17,), (1,), tensor.storage_offset() - 1)
    around[16] = 1
    with pytest.raises(AssertionError, match=r"after the tensor were written, the first at byte [01]"):
        check()
    tensor, check = guarded((3, 5), dtype)
    torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() - 1).zero_()
    with pytest.raises(AssertionError, match=rf"{dtype.itemsize} bytes before the tensor were written"):
        check()


def test_guard_of_an_empty_tensor():
    tensor, check = guarded((0, 4), torch.float32)
    assert tensor.shape == (0, 4)
    check()
