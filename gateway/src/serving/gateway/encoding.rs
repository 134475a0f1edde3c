//! Texts on their way through an encoder. It is asked like the moderator, bypassing everything meant for clients, and at no tenant's charge.

use super::Gateway;
use crate::{
    context::ranking::Meaning,
    metrics,
    serving::{
        backend::{Backend, Submission},
        embedded,
        encoder::Encoder,
        recall::{READ_AT_ONCE_MAX, Recall},
    },
    vectors::{kept::Tenant, patience::Reading, vector::Vector},
};
use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::{NewRequest, class::ClassId};
use tidemill_proto::{message::Embeds, tokens::Tokens};
use tidemill_safety::pii::redact::masked;
use tokio::time::timeout;

/// The part of an old text that is read.
const READ_BYTES_MAX: usize = 8 << 10;

/// The reason why a text is not read: a label of metrics.
pub type Unread = &'static str;

impl Gateway {
    /// Has a question read by an encoder, as far as requests [wait](crate::vectors::patience) for it.
    pub(super) async fn vector(&self, encoder: &Arc<Encoder>, text: &str, cut: bool, class: ClassId) -> Result<Vector, Unread> {
        let (backend, tokens) = self.encoded(encoder, text, cut)?;
        let request = self.embedding(tokens, class, encoder.wait);
        let turn = encoder.turn().ok_or("busy")?;
        let reading = encoder.ask();
        let run = {
            let encoder = Arc::clone(encoder);
            async move {
                let _turn = turn;
                let began = Instant::now();
                let vector = timeout(encoder.wait, read(backend, request)).await.unwrap_or(Err("overdue"));
                (encoder.observe)(began.elapsed());
                encoder.settle(reading, vector.is_ok());
                vector
            }
        };
        match reading {
            Reading::Awaited => run.await,
            Reading::Trial => {
                tokio::spawn(run);
                Err("paused")
            }
            Reading::Skipped => Err("paused"),
        }
    }

    /// Has the question read by which old messages and facts are ranked, and keeps its vector. Returns the reason if it was not read in time;
    /// `None` if it was, or if texts are ranked by their words alone.
    pub async fn read_question(&self, question: &str) -> Option<Unread> {
        let recall = self.shared.recall.as_ref()?;
        let tenant = self.vectors_tenant();
        if !recall.lacks(tenant, question) {
            return None;
        }
        let class = self.classes().by_tier(self.service_tier(None)).unwrap_or_default();
        match self.vector(&recall.encoder, &self.beginning(question), true, class).await {
            Ok(vector) => {
                recall.keep(tenant, question, vector);
                None
            }
            Err(reason) => {
                metrics::count_recall_unread(reason, 1);
                Some(reason)
            }
        }
    }

    /// The vectors of a question and of texts, as far as they are kept; `None` if the question's is not.
    pub fn meaning(&self, question: &str, texts: &[&str]) -> Option<Meaning> {
        let recall = self.shared.recall.as_ref()?;
        let tenant = self.vectors_tenant();
        let question = recall.vector(tenant, question)?;
        Some(Meaning { question, texts: texts.iter().map(|text| recall.vector(tenant, text)).collect() })
    }

    /// Whether old messages and facts are ranked by their meaning, too.
    pub fn recalls(&self) -> bool {
        self.shared.recall.is_some()
    }

    /// Has those texts read in the background whose vectors are not kept, so that later requests find them: the last ones first, and at most
    /// a tenant's part of what is read at a time. Takes a while: see [`compute`](Self::compute).
    pub fn read_ahead<'a>(&self, texts: impl DoubleEndedIterator<Item = &'a str>) {
        let Some(recall) = &self.shared.recall else { return };
        let tenant = self.vectors_tenant();
        let missing = texts.rev().filter(|text| !text.trim().is_empty() && recall.lacks(tenant, text));
        let missing: Vec<&str> = missing.take(READ_AT_ONCE_MAX).collect();
        if missing.is_empty() {
            return;
        }
        if let Err(reason) = self.begin_reading(recall, tenant, &missing) {
            metrics::count_recall_unread(reason, missing.len() as u64);
        }
    }

    fn begin_reading(&self, recall: &Arc<Recall>, tenant: Tenant, texts: &[&str]) -> Result<(), Unread> {
        if !recall.encoder.is_in_time() {
            return Err("paused");
        }
        let share = recall.read_ahead(self.party(), texts.len()).map_err(|_| "busy")?;
        let (submission, texts) = self.submit_texts(&recall.encoder, texts, Recall::READ_AHEAD_WITHIN)?;
        let recall = Arc::clone(recall);
        tokio::spawn(async move {
            let _share = share;
            match timeout(Recall::READ_AHEAD_WITHIN, embedded::collect(submission, texts.len())).await {
                Ok(Ok(rows)) => {
                    for (text, row) in texts.iter().zip(rows) {
                        Vector::new(&row).into_iter().for_each(|vector| recall.keep(tenant, text, vector));
                    }
                }
                Ok(Err(_)) => metrics::count_recall_unread("failed", texts.len() as u64),
                Err(_) => metrics::count_recall_unread("overdue", texts.len() as u64),
            }
        });
        Ok(())
    }

    /// Submits texts that no request waits for. Returns those that the encoder can read.
    pub(super) fn submit_texts(&self, encoder: &Encoder, texts: &[&str], within: Duration) -> Result<(Submission, Vec<String>), Unread> {
        let background = &self.classes().background().service_tier;
        let class = self.classes().by_tier(Some(background)).unwrap_or_default();
        let mut readable = Vec::with_capacity(texts.len());
        let mut requests = Vec::with_capacity(texts.len());
        let mut to = Err("failed");
        for text in texts {
            match self.encoded(encoder, &self.beginning(text), true) {
                Ok((backend, tokens)) => {
                    requests.push(self.embedding(tokens, class, within));
                    readable.push((*text).to_owned());
                    to = Ok(backend);
                }
                Err(reason) => to = to.or(Err(reason)),
            }
        }
        let submission = Submission::new(to?, requests).map_err(|_| "rejected")?;
        Ok((submission, readable))
    }

    /// A text's tokens for an encoder, and the cluster that serves it. With `cut`, of a text that is longer than the encoder reads, the
    /// beginning.
    fn encoded(&self, encoder: &Encoder, text: &str, cut: bool) -> Result<(Arc<dyn Backend>, Tokens), Unread> {
        let served = self.served(self.aliases().get(&encoder.model).unwrap_or(&encoder.model)).ok_or("no_model")?;
        let tokens_max = served.backend.context_tokens().ok_or("no_worker")? as usize;
        let tokenizer = &served.text.tokenizer;
        let tokens = if cut { tokenizer.encode_cut(text, Some(tokens_max)) } else { tokenizer.encode(text, true) };
        let tokens = Tokens::from(tokens.map_err(|_| "failed")?);
        match tokens.len() {
            0 => Err("failed"),
            len if len > tokens_max => Err("too_long"),
            _ => Ok((Arc::clone(&served.backend), tokens)),
        }
    }

    fn embedding(&self, tokens: Tokens, class: ClassId, within: Duration) -> NewRequest {
        let embeds = Embeds { second_text: tokens.len() as u32 };
        NewRequest::embedding(tokens, embeds, self.salt(&[]), class, within)
    }

    /// The beginning of an old text, as models may see it.
    pub(super) fn beginning<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let text = &text[..text.floor_char_boundary(READ_BYTES_MAX)];
        match self.pii().filter(|pii| pii.input) {
            Some(pii) => masked(&pii.finder, text).into(),
            None => text.into(),
        }
    }

    /// The tenant of the vectors of a request's texts: another one after each erasure, as of its answers.
    fn vectors_tenant(&self) -> Tenant {
        self.salt(&[]).first_chunk().copied().unwrap_or_default()
    }
}

async fn read(backend: Arc<dyn Backend>, request: NewRequest) -> Result<Vector, Unread> {
    let submission = Submission::new(backend, vec![request]).map_err(|_| "rejected")?;
    let rows = embedded::collect(submission, 1).await.map_err(|_| "failed")?;
    rows.first().and_then(|row| Vector::new(row)).ok_or("failed")
}
