"""Codex, which speaks responses only."""

import os
import pathlib

import turns

home = pathlib.Path.home() / ".codex"
home.mkdir()
(home / "config.toml").write_text(f"""
model = "{os.environ['MODEL']}"
model_provider = "tidemill"
model_context_window = {os.environ['WINDOW']}
check_for_update_on_startup = false

[model_providers.tidemill]
name = "Tidemill"
base_url = "{os.environ['OPENAI_BASE_URL']}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
model_catalog_url = "{os.environ['OPENAI_BASE_URL']}/models"
request_max_retries = 0
stream_max_retries = 0
""")


def command(text, number):
    return ["codex", "exec", "-s", "workspace-write", *(["resume", "--last"] if number else []), text]


print(turns.twenty(command))
