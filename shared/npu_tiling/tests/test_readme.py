import re
from pathlib import Path


def test_example_prints_what_the_readme_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.S)
    exec(code, {})
    assert capsys.readouterr().out.strip() == re.search(r"# (\{.*)", code).group(1)
