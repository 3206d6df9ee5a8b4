"""Blocks of `emulate`: nested, one after another, with other chips, and of other threads."""

import threading

import torch
from npu_offline import OfflineError, emulate
from sample_kernels import cast


def test_inner_block_that_launches_nothing_is_left_alone():
    x, y = torch.randn(256), torch.zeros(256)
    with emulate(threads=1) as outer:
        with emulate(threads=2):
            pass
        cast[(1,)](x, y, BN=256)
    assert len(outer.launches) == 1


def test_leaving_and_entering_again_and_nesting():
    from triton.runtime.driver import driver

    before = driver.active
    x, y = torch.randn(256), torch.zeros(256)
    with emulate() as outer:
        cast[(1,)](x, y, BN=256)
        with emulate("Ascend910B1", threads=1) as inner:
            cast[(1,)](x, y, BN=256)
        cast[(1,)](x, y, BN=256)
    assert driver.active is before
    with emulate() as again:
        cast[(1,)](x, y, BN=256)
    assert [len(e.launches) for e in (outer, inner, again)] == [2, 1, 1]
    assert (outer.soc, inner.soc) == ("Ascend910B4", "Ascend910B1")


def test_each_chip_reports_its_own_cores():
    from triton.runtime.driver import driver

    def cores(soc):
        with emulate(soc):
            return driver.active.utils.get_device_properties(driver.active.get_current_device())["num_vectorcore"]

    assert (cores("Ascend910B1"), cores("Ascend910B4")) == (48, 40)


def test_operators_are_told_the_chip():
    import npu_tiling

    cpu = torch.device("cpu")
    assert npu_tiling.device_for(cpu) is None
    with emulate("Ascend910B1"):
        assert npu_tiling.device_for(cpu) == npu_tiling.soc("Ascend910B1")
    assert npu_tiling.device_for(cpu) is None


def test_another_thread_cannot_open_a_block_of_its_own():
    said = []

    def other():
        try:
            with emulate():
                pass
        except OfflineError as error:
            said.append(str(error))

    with emulate():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert said == ["another thread is inside an emulate block, which emulates launches of every thread: share it"]
    other()
    assert len(said) == 1
