//! `--model` to a directory.
