//! Personal data in prompts and answers: this server's treatment of it, and its counters.

use super::metrics;
use crate::{dialog::Dialog, generation::personal::Personal, requests::options::Options};
use std::{sync::Arc, time::Instant};
use tidemill_safety::pii::{Kind, find::Finder, vault::Vault};

#[derive(Clone, Debug)]
pub struct Pii {
    pub finder: Arc<Finder>,
    /// Whether models see placeholders, and clients get the originals back.
    pub input: bool,
    /// Whether personal data is removed from answers.
    pub output: bool,
}

impl Pii {
    /// Returns the dialog as its model may see it, and puts the originals into `options`. `None` if nothing is hidden.
    pub fn hide_dialog(&self, dialog: &Dialog, options: &mut Options) -> Option<Dialog> {
        let mut hidden = self.input.then(|| dialog.clone())?;
        self.hide(options, |vault, finder| {
            hidden.each_text(|text| vault.see(text));
            hidden.each_text(|text| *text = vault.redact(finder, text));
        });
        Some(hidden)
    }

    /// Hides personal data in texts in the same way.
    pub fn hide_texts(&self, texts: &mut [String], options: &mut Options) {
        if self.input {
            self.hide(options, |vault, finder| {
                texts.iter().for_each(|text| vault.see(text));
                texts.iter_mut().for_each(|text| *text = vault.redact(finder, text));
            });
        }
    }

    fn hide(&self, options: &mut Options, act: impl FnOnce(&mut Vault, &Finder)) {
        let started = Instant::now();
        let mut vault = Vault::default();
        act(&mut vault, &self.finder);
        metrics::observe_pii_input(started.elapsed());
        for (kind, found) in vault.counts() {
            metrics::count_redactions("input", kind, found as u64);
        }
        options.vault = Some(Arc::new(vault)).filter(|vault| !vault.is_empty());
    }

    /// The treatment of an answer to a request with these options.
    pub fn personal(&self, options: &Options) -> Personal {
        let count: fn(Kind) = |kind| metrics::count_redactions("output", kind, 1);
        Personal { finder: self.output.then(|| Arc::clone(&self.finder)), vault: options.vault.clone(), count: Some(count) }
    }
}
