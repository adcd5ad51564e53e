"""Installs the extra `learn` into a new environment, and runs each lab there in both languages:
`make test-labs`. The tests of this folder check the results of the labs; this program checks that
the packages of the extra suffice.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAB_S = 60
"""The limit of a chapter, in seconds on 2 free cores."""
LIST = """
from unisono.course import LANGUAGES, chapters, lab
for language in LANGUAGES:
    for chapter in chapters():
        print(lab(chapter.name, language))
"""


def main() -> None:
    """Prints the time of each lab. Ends with status 1 if a lab fails."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin/python"))
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"{ROOT}[learn]"], check=True)
        command = [python, "-c", LIST]
        labs = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        failed = []
        for lab in labs.stdout.split():
            begin = time.perf_counter()
            done = subprocess.run(
                [python, lab], cwd=folder, capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - begin
            late = "" if seconds < LAB_S else f", over {LAB_S} s"
            name = "/".join(Path(lab).parts[-2:])
            print(f"{name}: {seconds:.0f} s{late}, status {done.returncode}", flush=True)
            if done.returncode:
                failed.append(name)
                print(done.stdout + done.stderr)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
