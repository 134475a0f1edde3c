"""Qwen Code by OpenAI's API. It may edit files, but run nothing."""

import json
import os
import pathlib

import turns

home = pathlib.Path.home() / ".qwen"
home.mkdir()
(home / "settings.json").write_text(json.dumps({
    "security": {"auth": {"selectedType": "openai"}},
    "model": {"name": os.environ["MODEL"], "generationConfig": {"samplingParams": {"max_tokens": 512}}, "maxSessionTurns": 6},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True},
    "tools": {"exclude": ["run_shell_command"]},
}))


def command(text, number):
    return ["qwen", "--approval-mode", "auto-edit", *(["--continue"] if number else []), "-p", text]


print(turns.twenty(command))
