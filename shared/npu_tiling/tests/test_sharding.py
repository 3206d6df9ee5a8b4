"""What is a DTensor, where its parts are, and which placements are refused; on a mesh of one process."""

import os
import subprocess
import sys

import pytest
import torch
from npu_tiling.dtensor import Shards, is_distributed, moved, shard, summed

dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor  # noqa: E402


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("batch", "sequence"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_import_leaves_dtensors_alone():
    """Nobody pays a second for them who has none; where torch_npu is installed, `import torch` loads it, and it does."""
    code = "import sys, torch, npu_tiling.dtensor; sys.exit('torch.distributed.tensor' in sys.modules)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_dtensors_are_recognised_wherever_they_stand(mesh):
    plain = torch.zeros(4)
    part = distribute_tensor(plain, mesh, [Replicate(), Replicate()])
    for arguments in ((part,), (plain, None, [plain, part]), ((torch.nn.Parameter(part),),)):
        assert is_distributed(arguments)
    for arguments in ((), (plain, None, 1.0, "x"), ([plain], (torch.nn.Parameter(plain),)), (torch.zeros(2).to_sparse(),)):
        assert not is_distributed(arguments)


def test_placements_move_with_dimensions_and_sums_are_partial():
    placements = (Shard(1), Replicate())
    assert moved(placements, 1) == (Shard(2), Replicate())
    assert summed(placements) == (Partial(), Replicate())
    assert [shard(placement) for placement in (*placements, Partial())] == [1, -1, -1]


@pytest.mark.parametrize(
    ("placements", "first", "said"),
    [
        ((Shard(2), Replicate()), 0, "'batch' and must be Replicate() or Shard of a dimension from 0 to 1."),
        ((Replicate(), Shard(0)), 1, "'sequence' and must be Replicate() or Shard of a dimension from 1 to 1."),
    ],
)
def test_split_row_is_refused_by_argument_placement_and_mesh_dimension(mesh, placements, first, said):
    shards = Shards({"x": distribute_tensor(torch.zeros(2, 3, 4), mesh, placements)})
    with pytest.raises(ValueError, match="x is Shard") as error:
        shards.rows("x", first)
    assert said in str(error.value)


def test_one_dimension_split_twice_has_no_part(mesh):
    shards = Shards({"weight": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0), Shard(0)])})
    with pytest.raises(ValueError, match=r"weight is Shard\(dim=0\) on mesh dimension 'sequence' and must be Replicate"):
        shards.part("weight", 0)


def test_part_wrapped_again_is_the_tensor(mesh):
    x = torch.randn(2, 0, 3)
    shards = Shards({"x": distribute_tensor(x, mesh, [Shard(0), Replicate()]), "weight": None})
    assert shards.local("weight") is None
    assert shards.part("x", 0) == (0, 2)
    assert shards.part("x", 1) is None
    wrapped = shards.wrap(shards.local("x"), (Shard(0), Replicate()), x.shape)
    assert wrapped.stride() == x.stride()
    assert torch.equal(wrapped.full_tensor(), x)
