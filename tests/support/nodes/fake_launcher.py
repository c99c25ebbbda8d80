"""Stand-in of `python -m gllm.deploy.ray`: reports machines, or an error, without Ray.

Usage: fake_launcher.py FOLDER LIVES. Writes each spec to a file of the folder. Starts beyond LIVES
report an error; others run until their input ends, or until a file `kill` is there.
"""

import json
import os
import select
import sys
import time
from pathlib import Path


def main() -> int:
    folder, lives = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads(sys.stdin.buffer.readline())
    number = len(list(folder.glob("spec*")))
    temporary = folder / f"new{number}"
    temporary.write_text(json.dumps(spec))
    temporary.rename(folder / f"spec{number}")
    if number >= lives:
        print(json.dumps({"error": "no machines"}), flush=True)
        return 1
    event = {"num_nodes": 3, "host": "127.0.0.9", "gpu_ids": []}
    print(json.dumps(event), flush=True)
    while not (folder / f"kill{number}").exists():
        ready, _, _ = select.select([0], [], [], 0.05)
        if ready and not os.read(0, 1):
            (folder / "ended").touch()
            return 0
        time.sleep(0.01)
    return 9


if __name__ == "__main__":
    sys.exit(main())
