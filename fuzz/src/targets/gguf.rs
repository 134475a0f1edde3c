//! GGUF files: whatever their contents, they are unpacked or refused, and an unpacked one is a model directory or is refused as one.

use super::tree;
use crate::{
    dice::Dice,
    mutate::bytes,
    target::{Subject, Target},
};
use std::{fs, time::Duration};
use tidemill_gateway::text::TextModel;
use tidemill_gguf::{directory, file::Gguf};
use tidemill_model::{LoadOptions, Model};
use tidemill_proto::block::KvDtype;

pub(crate) const GGUF: Target = Target {
    name: "gguf",
    about: "GGUF files, unpacked into directories, and those read",
    open,
    cpu_max: Duration::from_secs(20),
    bytes_max: 1 << 30,
    short: 150,
};

/// The bytes of the metadata and the tensors' table; in the rest, any bytes are numbers.
const HEADER: usize = 20_000;

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let dir = tree::path("gguf/tests/fixtures");
    let seeds = ["blocks.gguf", "llama3.gguf", "pieces.gguf"].map(|name| fs::read(dir.join(name)));
    let seeds = seeds.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(Box::new(move |dice: &mut Dice| {
        let mut contents = dice.pick(&seeds).clone();
        // The place of the keys, of the tokens, or of the tensors.
        let from = dice.below(contents.len().min(HEADER));
        let mut part: Vec<u8> = contents.drain(from..(from + 400).min(contents.len())).collect();
        bytes::mutate(dice, &mut part);
        dice.show("part", &part);
        contents.splice(from..from, part);
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (path, unpacked) = (dir.path().join("model.gguf"), dir.path().join("unpacked"));
        fs::write(&path, contents).map_err(|error| error.to_string())?;
        let Ok(file) = Gguf::open(&path) else { return Ok(()) };
        if directory::write(&file, &unpacked, &|_, _| ()).is_ok() {
            let _ = TextModel::load(&unpacked);
            let options = LoadOptions { kv_dtype: KvDtype::F32, quantize: None, threads: 1, isa: None };
            let _ = Model::load(&unpacked, &options, &mut |_, _| ());
        }
        Ok(())
    }))
}
