//! The meaning of a request, compared with examples, before `auto` chooses the model that answers it.

use super::Gateway;
use crate::{
    metrics,
    requests::{body::Whole, error::ApiError, parse::JsonBody},
    routing::{
        meaning::{Examples, Meaning},
        text::BodyText,
    },
    serving::{embedded, examples::RouteExamples, gateway::encoding::Unread},
    vectors::vector::Vector,
};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

/// The longest time that reading the examples takes.
const EXAMPLES_WITHIN: Duration = Duration::from_secs(30);
/// The number of examples that are read at a time.
const EXAMPLES_AT_ONCE: usize = 64;

impl Gateway {
    /// Binds the handle to what the body's meaning says about the model, where that counts: `auto` may choose, and has examples.
    pub async fn weighed(self: &Arc<Self>, body: Whole) -> Result<(Arc<Self>, Whole), ApiError> {
        let Some(examples) = self.shared.examples.clone().filter(|_| !self.is_shadow()) else { return Ok((Arc::clone(self), body)) };
        let worker = Arc::clone(self);
        let looked_at = self.compute_body(body.weight(), move || {
            // A body that cannot be read is its endpoint's to refuse.
            let said = JsonBody::parse(&body).ok().and_then(|parsed| {
                let said = BodyText::of(parsed.fields());
                let asked = parsed.fields().get("model").and_then(|model| model.as_str());
                worker.router()?.may_weigh(asked).then(|| said.content().last.trim().to_owned())
            });
            Ok((said, body))
        });
        let (said, body) = looked_at.await?;
        let Some(said) = said.filter(|said| !said.is_empty()) else { return Ok((Arc::clone(self), body)) };
        let meaning = match self.side(&examples, &said).await {
            Ok(side) => Meaning::Side(side),
            Err(reason) => {
                metrics::count_route_unread(reason);
                Meaning::Unread(reason)
            }
        };
        Ok((Arc::new(Self { meaning, ..(**self).clone() }), body))
    }

    async fn side(&self, examples: &Arc<RouteExamples>, said: &str) -> Result<f64, Unread> {
        let Some(read) = examples.read() else {
            if examples.are_due() {
                let (worker, examples) = (self.for_nobody(), Arc::clone(examples));
                tokio::spawn(async move { worker.read_examples(&examples).await });
            }
            return Err("examples");
        };
        let class = self.classes().by_tier(self.service_tier(None)).unwrap_or_default();
        let vector = self.vector(&examples.encoder, &self.beginning(said), true, class).await?;
        read.side(&vector).ok_or("failed")
    }

    /// Reads the examples, if the encoder can.
    async fn read_examples(&self, examples: &RouteExamples) {
        let both = async { (self.read_all(examples, &examples.small).await, self.read_all(examples, &examples.large).await) };
        let read = match timeout(EXAMPLES_WITHIN, both).await {
            Err(_) => Err("overdue"),
            Ok((Ok(small), Ok(large))) => Examples::new(&small, &large).ok_or("they cannot be told apart"),
            Ok((small, large)) => Err(small.err().or(large.err()).unwrap_or("failed")),
        };
        match read {
            Ok(read) => examples.take(read),
            Err(reason) => tracing::warn!(reason, "the examples of router.auto could not be read: it goes by form alone, and tries again"),
        }
    }

    async fn read_all(&self, examples: &RouteExamples, texts: &[String]) -> Result<Vec<Vector>, Unread> {
        let mut vectors = Vec::with_capacity(texts.len());
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        for some in texts.chunks(EXAMPLES_AT_ONCE) {
            let (submission, readable) = self.submit_texts(&examples.encoder, some, EXAMPLES_WITHIN)?;
            let rows = embedded::collect(submission, readable.len()).await.map_err(|_| "failed")?;
            vectors.extend(rows.iter().filter_map(|row| Vector::new(row)));
        }
        Ok(vectors)
    }
}
