"""Claude Code, which speaks messages. It may read and edit files, but run nothing."""

import os

import turns

os.environ |= {
    "ANTHROPIC_MODEL": os.environ["MODEL"],
    "ANTHROPIC_SMALL_FAST_MODEL": os.environ["MODEL"],
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": os.environ["WINDOW"],
}


def command(text, number):
    given = ["--tools", "Read,Edit,Write,Glob,Grep", "--permission-mode", "acceptEdits", "--max-turns", "4"]
    return ["claude", "-p", text, *given, *(["--continue"] if number else [])]


print(turns.twenty(command))
