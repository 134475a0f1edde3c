"""aider, which edits files by itself, in the format that it asks the model for."""

import os

import turns

os.environ |= {"OPENAI_API_BASE": os.environ["OPENAI_BASE_URL"], "AIDER_ANALYTICS": "false", "AIDER_CHECK_UPDATE": "false"}


def command(text, number):
    given = ["--model", f"openai/{os.environ['MODEL']}", "--restore-chat-history", "--no-show-model-warnings", "--no-suggest-shell-commands"]
    given += ["--no-auto-commits", "--no-gitignore", "--no-detect-urls", "--no-pretty", "--no-analytics", "--no-show-release-notes", "--yes-always"]
    return ["aider", *given, "--message", text, "stats.py", "test_stats.py"]


print(turns.twenty(command))
