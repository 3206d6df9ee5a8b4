"""The README's examples run as they stand."""

import re
from pathlib import Path


def test_examples_run(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    assert len(blocks[0].strip().splitlines()) < 12
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)
    assert capsys.readouterr().out.strip() == re.search(r"print\(.*  # (.*)", text)[1]
    assert namespace["part"].shape == (4, 512, 768)
