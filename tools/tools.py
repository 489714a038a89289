"""`import tools` in a program started by its path finds this file, which puts the project's folder on the path.

`python tools/x.py` puts tools/ first on the import path, but the package is found only from one level up.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
del sys.modules["tools"]
importlib.import_module("tools")
