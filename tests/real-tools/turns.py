"""Twenty turns of an agent in a folder with a small program: what the agents of `tools/` share."""

import pathlib
import subprocess

FILES = {
    "stats.py": "def total(numbers):\n    return sum(numbers)\n\n\ndef mean(numbers):\n    return total(numbers) / (len(numbers) + 1)\n",
    "test_stats.py": "from stats import mean, total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n",
    "README.md": "# stats\n\nSums and means.\n",
}
TURNS = [
    "What does stats.py do? Answer in one sentence.",
    "Read test_stats.py, and say how many tests there are.",
    "Why does the test of `mean` fail?",
    "Mend `mean` in stats.py.",
    "Add a function `median` to stats.py.",
    "Add a test of `median` to test_stats.py.",
    "What is the median of 1, 2 and 10?",
    "Search for all uses of `total`.",
    "Write a sentence about `median` into README.md.",
    "Which files are in this folder?",
    "Rename the parameter of `total` to `values`.",
    "Is `mean` of an empty list an error?",
    "Let `mean` return 0 for an empty list.",
    "Write a docstring for `mean`.",
    "Name one more function that would be useful here.",
    "Write its signature, and nothing else.",
    "What is its time complexity?",
    "Read README.md again.",
    "Summarize in two sentences what has changed.",
    "Say goodbye.",
]
TURN_S = 400


def twenty(command):
    """`command` makes the command line of a turn from its text and its number, which begins with 0. Returns how many ended with words."""
    folder = pathlib.Path("project")
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "--quiet", "-m", "a"], cwd=folder, check=True)
    said = 0
    for number, text in enumerate(TURNS):
        done = subprocess.run(command(text, number), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=TURN_S)
        print(f"> {text}\n{done.stdout}")
        assert done.returncode == 0, f"turn {number + 1} ended with {done.returncode}: {done.stdout[-300:]}"
        said += bool(done.stdout.strip())
    return f"{len(TURNS)} turns, {said} of which ended with words"
