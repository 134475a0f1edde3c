//! The default model: a small one that explains Tidemill, embedded in the binary. `bench/demo-model` trains it.

use std::{fs, io, path::Path};

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../demo-model/", $name)).as_slice())),*]
    };
}

/// Writes the checkpoint into `dir` as a Hugging Face model directory.
pub fn unpack(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    for (name, bytes) in files!["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::write(dir.join(name), bytes)?;
    }
    Ok(())
}
