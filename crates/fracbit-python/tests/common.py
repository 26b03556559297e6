"""What the tests share: the demo model of the repository, and the program."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = REPOSITORY / "crates/fracbit-cli/demo-model"
STORIES = DEMO / "stories.txt"

# What leaves the demo model alone but for its bytes: quick, and the same every time.
QUICK = {
    "scheme": "nuq-4",
    "data_free": True,
    "sensitivity": "prior",
    "rotation": "fold",
    "smoothing": False,
}
QUICK_FLAGS = (
    "--scheme=nuq-4 --data-free --sensitivity=prior --rotation=fold --no-smoothing".split()
)


def program(*args, **options):
    """Runs the console script that the wheel brings."""
    script = Path(sys.executable).with_name("fracbit")
    line = [str(script), *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, **options)
