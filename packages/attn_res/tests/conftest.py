import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # depth.py, which pytest's importlib mode leaves out
