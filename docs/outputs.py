"""Replaces command outputs in the docs by the outputs of real runs.

    python docs/outputs.py FOLDER [PAGE ...]

FOLDER has the files that the pages use: book.txt, chapter.txt … Without PAGE, updates the pages that contain
`MARKER`. The console and Python blocks of a page run in order in a copy of FOLDER, up to the last output. The output of
a console block replaces the text block after it. A line `…` in the old text shortens the new text: before `…`, the
new text keeps the old text's number of lines; after `…`, the last new line with the same first word replaces each old
line. Lines that begin with `> ` are typed into a conversation.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = "<!-- outputs: docs/outputs.py -->"
BLOCK = re.compile(r"```(console|python)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
SKIPPED_COMMANDS = ("hf:", "gpt data fetch", "gpt serve")  # commands that need a network or never end


def update_page(page: str, folder: Path) -> str:
    """Runs the commands of a page in ``folder``; returns the page with their outputs."""
    last_output = max((match.end() for match in BLOCK.finditer(page) if match[3] is not None), default=0)

    def with_output(match: re.Match[str]) -> str:
        kind, code, old_output = match.groups()
        if match.start() >= last_output:
            return match[0]
        if kind == "python":
            run([sys.executable, "-c", code], folder)
            return match[0]
        commands = [line[2:] for line in code.splitlines() if line.startswith("$ gpt ")]
        new_output = "".join(run_conversation(command, old_output or "", folder) for command in commands)
        return (
            match[0]
            if old_output is None
            else match[0].replace(f"```text\n{old_output}", f"```text\n{shorten(new_output, old_output)}")
        )

    return BLOCK.sub(with_output, page)


def run_conversation(command: str, old: str, folder: Path) -> str:
    """Returns the output of ``command``. If ``old`` is a conversation, asks its questions again."""
    questions = [line for line in old.splitlines() if line.startswith("> ")]
    if not questions:
        return "" if any(part in command for part in SKIPPED_COMMANDS) else run(command, folder)
    previous, conversation = "", ""
    for count, question in enumerate(questions, 1):  # The seed reproduces earlier answers.
        transcript = run(command, folder, "".join(line[2:] + "\n" for line in questions[:count]))
        conversation += f"{question}\n{transcript.removeprefix(previous)}"
        previous = transcript
    return conversation


def run(command: str | list[str], folder: Path, stdin: str = "") -> str:
    """Runs a command and returns its stdout and stderr. Exits if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.run(
        command, shell=isinstance(command, str), cwd=folder, env={**os.environ, "PATH": path}, input=stdin, check=False,
        encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if process.returncode:
        sys.exit(f"{command}\n{process.stdout}")
    return process.stdout


def shorten(printed: str, old: str) -> str:
    """Shortens ``printed`` as ``old`` is shortened, if ``old`` contains a line `…`. Strips spaces from line ends."""
    lines, old_lines = [line.rstrip() for line in printed.rstrip().splitlines()], old.splitlines()
    if "…" in old_lines:
        index = old_lines.index("…")
        last_lines = {word: line for line in lines for word in line.split()[:1]}
        lines = [*lines[:index], "…", *(last_lines[line.split()[0]] for line in old_lines[index + 1 :])]
    return "".join(f"{line}\n" for line in lines)


def main(files: str, *names: str) -> None:
    """Updates the outputs of pages."""
    pages = [Path(name) for name in names] or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if names or MARKER in text:
            with tempfile.TemporaryDirectory() as place:
                folder = shutil.copytree(files, Path(place) / "work")
                page.write_text(update_page(text, folder), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
