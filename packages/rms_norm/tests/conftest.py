import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # formula.py and ascend_calls.py, which pytest's importlib mode leaves out
