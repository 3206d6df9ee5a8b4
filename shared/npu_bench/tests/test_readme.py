import re
from pathlib import Path

import pytest
import torch
from npu_bench import UnavailableError
from npu_bench.scripts import load


def test_script_of_the_readme_is_a_benchmark(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script = tmp_path / "sigmoid.py"
    script.write_text(code)
    benchmark = load(script)
    (case,) = benchmark.cases
    assert benchmark.bytes_moved(case, "full") == 5 * 2048 * 4096 * 2
    assert benchmark.inputs(case, torch.device("cpu"))["x"].requires_grad
    with pytest.raises(UnavailableError, match="some_package"):
        benchmark.providers["ours"](case, torch.device("cpu"))
