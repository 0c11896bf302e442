"""Runs the notebooks of examples/notebooks, as one rank, and writes or compares their outputs.

python docs/notebooks.py          # compares; a test does so
python docs/notebooks.py --write
"""

import contextlib
import io
import json
import sys
from pathlib import Path

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "examples/notebooks").glob("*.ipynb"))


def run(file: Path) -> tuple[dict, list[list[str]]]:
    """Return the notebook, and what each of its cells of code prints, in lines."""
    notebook, names, printed = json.loads(file.read_text()), {"__name__": "__main__"}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), file.name, "exec"), names)
            printed.append(out.getvalue().splitlines(keepends=True))
    return notebook, printed


def main() -> int:
    wrong = 0
    for file in NOTEBOOKS:
        notebook, printed = run(file)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for count, (cell, lines) in enumerate(zip(cells, printed, strict=True), 1):
            stream = {"name": "stdout", "output_type": "stream", "text": lines}
            outputs = [stream] if lines else []
            if cell["outputs"] != outputs:
                wrong += 1
                print(f"{file.name}, cell {count}: {''.join(lines)}")
            cell |= {"outputs": outputs, "execution_count": count}
        if "--write" in sys.argv:
            file.write_text(json.dumps(notebook, indent=1) + "\n")
    return 1 if wrong and "--write" not in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
