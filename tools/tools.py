"""What `import tools` finds in a program that is started by its path: puts the project's folder on the path.

`python tools/x.py` has this folder first on its path, whatever the current one is; the package is one level up.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
del sys.modules["tools"]
importlib.import_module("tools")
